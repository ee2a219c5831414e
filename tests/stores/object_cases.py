"""A bucket keeps the contract, on moto's S3 server; run by `test_objects`."""

from __future__ import annotations

import random
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType

import pytest
from moto.server import ThreadedMotoServer

from lightning_commfree.stores import objects, retrying
from lightning_commfree.stores.objects import ObjectStore
from lightning_commfree.stores.retrying import Retrying
from lightning_commfree.stores.store import Store, StoreError, open_store
from tests.stores.contract import check_big_values, check_keys, check_race, check_verbs
from tests.stores.faulty_store import FaultyStore


@pytest.fixture(scope="module", autouse=True)
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
    yield url
    server.stop()


@pytest.fixture
def store(endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Store:
    for name, value in {
        "AWS_ENDPOINT": endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(retrying, "_FIRST_PAUSE_S", 0.01)
    return open_store(f"s3://bucket/{request.node.name}")


def test_verbs_and_keys(store: Store) -> None:
    check_verbs(store)
    check_keys(store)


def test_big_values(store: Store) -> None:
    check_big_values(store)


class Slow(BaseHTTPRequestHandler):
    """A bucket behind a link of 1 MB/s, with one object."""

    protocol_version = "HTTP/1.1"
    data = b""

    def do_PUT(self) -> None:
        size, data = int(self.headers["Content-Length"]), b""
        while len(data) < size:
            part = self.rfile.read(min(size - len(data), 100_000))
            if not part:
                return  # the client has given up
            data += part
            time.sleep(0.1)
        Slow.data = data
        self.answer(200, b"")

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        if asked is None:
            return self.answer(200, self.data)
        first, last = map(int, asked.removeprefix("bytes=").split("-"))
        part, size = self.data[first : last + 1], len(self.data)
        return self.answer(
            206, part, {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{size}"}
        )

    def answer(
        self, code: int, body: bytes, more: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.send_response(code)
        about = {"ETag": '"1"', "Last-Modified": "Mon, 30 Nov 2026 08:00:00 GMT"}
        for name, value in {**about, "Content-Length": str(len(body)), **more}.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(OSError):  # a client may have read enough
            for at in range(0, len(body), 100_000):
                self.wfile.write(body[at : at + 100_000])
                time.sleep(0.1)

    def log_message(self, *_: object) -> None: ...


def test_a_large_object_may_take_longer_than_a_small_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the state of a large model does over a slow link: 1.5 s, in pieces of 0.1 s."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    data = random.Random(0).randbytes(1_500_000)
    with pytest.raises(StoreError):
        ObjectStore("s3://bucket/slow", timeout_s=1.0).create("a", data)
    monkeypatch.setattr(objects, "PIECE_BYTES", 100_000)
    slow = ObjectStore("s3://bucket/slow", timeout_s=1.0)
    assert slow.create("a", data)
    assert slow.get("a") == data
    server.shutdown()


def test_one_winner(store: Store) -> None:
    check_race(store)


def test_one_winner_though_answers_are_lost(store: Store) -> None:
    check_race(Retrying(FaultyStore(store, refused=0.1, lost=0.3)))


def test_two_prefixes_are_two_stores(store: Store) -> None:
    other = open_store("s3://bucket/other")
    assert store.create("a", b"1")
    assert other.create("a", b"2")
    assert store.list("") == ["a"]


def test_no_answer_and_no_bucket_are_outages(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = open_store("s3://absent/run")
    with pytest.raises(StoreError, match="s3://absent/run did not answer `create`"):
        absent.create("a", b"1")
    with socket.socket() as deaf:  # it has the port, and refuses connections
        deaf.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT", "http://{}:{}".format(*deaf.getsockname()))
        with pytest.raises(StoreError, match="`get`"):
            open_store("s3://bucket/run").get("a")
