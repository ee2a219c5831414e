from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lightning_commfree.stores import command, tcp
from lightning_commfree.stores.retrying import Retrying
from lightning_commfree.stores.store import StoreError, StoreLostError
from lightning_commfree.stores.tcp import TcpStore
from tests.mortal import wait_stopped
from tests.stores.contract import check_contract
from tests.world import free_port

FORK = multiprocessing.get_context("fork")


def _serve(port: int) -> None:
    raise SystemExit(command.main(["serve", "--bind", f"127.0.0.1:{port}"]))


@contextmanager
def server(port: int) -> Iterator[Any]:
    """Run the command in a process of its own, and end it by SIGTERM."""
    process = FORK.Process(target=_serve, args=(port,))
    process.start()
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    try:
        yield process
    finally:
        os.kill(process.pid, signal.SIGCONT)
        process.terminate()
        process.join(10)
        assert process.exitcode == 0


def test_a_tcp_store_keeps_the_contract() -> None:
    port = free_port()
    with server(port):
        check_contract(TcpStore("127.0.0.1", port))


def test_a_server_that_does_not_answer_is_an_outage_that_ends() -> None:
    port = free_port()
    with server(port) as process:
        store = TcpStore("127.0.0.1", port, timeout_s=0.5)
        assert store.create("a", b"1")
        os.kill(process.pid, signal.SIGSTOP)
        wait_stopped(process)
        for _ in range(2):  # on the old connection, and on a new one
            with pytest.raises(StoreError, match=r"no answer for 0.5 s"):
                store.get("a")
        os.kill(process.pid, signal.SIGCONT)
        assert Retrying(store, timeout_s=10).get("a") == b"1"


def begin_a_set(port: int) -> socket.socket:
    """Send the beginning of a request, as a slow link does (torch's protocol: `TCPStore.cpp`)."""
    slow = socket.create_connection(("127.0.0.1", port), 5)
    validate, put, length = 0, 1, 1 << 20
    slow.sendall(struct.pack("<BIBQ", validate, 0x3C85F7CE, put, length))
    time.sleep(0.2)  # the server reads it
    return slow


@pytest.mark.parametrize("has_libuv", [True, False])
def test_a_request_that_takes_long_stops_no_other_member(
    has_libuv: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    create, said = tcp.TCPStore, "This build of torch has no libuv"

    def server_of_this_build(*args: Any, **options: Any) -> Any:
        if options["use_libuv"] and not has_libuv:
            raise RuntimeError("use_libuv was requested but PyTorch was built without")
        return create(*args, **options)

    port = free_port()
    with monkeypatch.context() as patch:
        patch.setattr(tcp, "TCPStore", server_of_this_build)
        served = tcp.serve("127.0.0.1", port)
    store = TcpStore("127.0.0.1", port, timeout_s=2.0)
    assert store.create("a", b"1")
    with begin_a_set(port):
        if has_libuv:
            assert store.get("a") == b"1"
        else:
            with pytest.raises(StoreError, match="no answer for 2 s"):
                store.get("a")
    assert (said in caplog.text) is not has_libuv
    del served


def test_two_that_delete_the_same_keys_meet_no_error() -> None:
    """With libuv, a key that is deleted within a read looks empty."""
    port = free_port()
    with server(port):
        stores = [TcpStore("127.0.0.1", port) for _ in range(2)]
        for i in range(500):
            stores[0].create(f"a/{i}", b"1")
        errors: list[Exception] = []

        def delete_all(store: TcpStore) -> None:
            try:
                for i in range(500):
                    store.delete(f"a/{i}")
            except Exception as error:  # noqa: BLE001 - asserted below
                errors.append(error)

        threads = [threading.Thread(target=delete_all, args=(store,)) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert stores[0].list("a/") == []


def test_a_restarted_server_has_lost_everything_and_says_so() -> None:
    port = free_port()
    store = TcpStore("127.0.0.1", port)
    with pytest.raises(StoreError, match="refused"):
        store.get("a")
    with server(port):
        assert store.create("a", b"1")
    with pytest.raises(StoreError, match="`get`"):
        store.get("a")
    with server(port):
        with pytest.raises(StoreLostError, match="was replaced by another"):
            Retrying(store, timeout_s=10).get("a")
        assert TcpStore("127.0.0.1", port).create("a", b"2")


def _create_without_end(port: int) -> None:
    store = TcpStore("127.0.0.1", port)
    for count in range(10_000):
        store.create(f"big/{count}", bytes(20 << 20))


def test_a_process_killed_in_a_create_leaves_no_half_value() -> None:
    port = free_port()
    with server(port):
        writer = FORK.Process(target=_create_without_end, args=(port,))
        writer.start()
        store = TcpStore("127.0.0.1", port)
        deadline = time.monotonic() + 20
        while store.get_range("big/0", 0, 1) is None:
            assert time.monotonic() < deadline
        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join()
        keys = store.list("big/")
        assert "big/0" in keys
        for key in keys:
            assert store.get(key) == bytes(20 << 20)


def test_a_port_in_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    handlers = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    try:
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit):
            command.main(["serve", "--bind", f"127.0.0.1:{taken.getsockname()[1]}"])
    finally:
        for signum, handler in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True):
            signal.signal(signum, handler)
    assert "Cannot serve at 127.0.0.1" in capsys.readouterr().err
