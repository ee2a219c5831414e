"""A bucket keeps the contract, on moto's S3 server; run by `test_objects`."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator

import pytest
from moto.server import ThreadedMotoServer

from lightning_commfree.stores import retrying
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
