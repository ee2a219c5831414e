"""A joiner gets its state over HTTP: resumed, checked, never unpickled; garbage changes nothing."""

from __future__ import annotations

import json
import os
import pickle
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_commfree.elastic import state_server
from lightning_commfree.elastic.board import get_text
from lightning_commfree.elastic.state_server import TOKEN, StateServer, public_address

STATE = {"outer": {"weight": torch.arange(300_000.0)}, "momentum": [torch.ones(3)], "step": 7}


@pytest.fixture(autouse=True)
def no_shared_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)


@pytest.fixture
def donor() -> Iterator[StateServer]:
    server = StateServer(patience_s=5.0)
    server.serve(lambda: STATE, messages)
    yield server
    server.close()


@pytest.fixture
def joiner() -> Iterator[StateServer]:
    server = StateServer(patience_s=1.0)
    yield server
    server.close()


def messages(first: int) -> list[dict[str, Any]]:
    if first < 3:
        raise LookupError("no longer kept")
    return [{"flight": flight, "codes": torch.tensor([flight])} for flight in range(first, 6)]


def assert_whole(state: dict[str, Any]) -> None:
    assert torch.equal(state["outer"]["weight"], STATE["outer"]["weight"])
    assert torch.equal(state["momentum"][0], torch.ones(3))
    assert state["step"] == 7


def where(server: StateServer) -> tuple[str, int]:
    host, _, port = public_address(server.address).removeprefix("http://").partition(":")
    return host, int(port)


def raw(server: StateServer, request: bytes) -> bytes:
    with socket.create_connection(where(server), timeout=5.0) as connection:
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    return answer


def test_a_joiner_gets_the_snapshot_and_later_messages(
    donor: StateServer, joiner: StateServer
) -> None:
    assert_whole(joiner.fetch_snapshot(donor.address))
    assert [m["flight"] for m in joiner.fetch_messages(donor.address, 4)] == [4, 5]
    assert joiner.fetch_messages(donor.address, 6) == []
    with pytest.raises(LookupError):
        joiner.fetch_messages(donor.address, 2)
    assert donor.sent_bytes > 1_200_000
    assert where(donor)[0] == "127.0.0.1"


def test_a_download_that_is_cut_continues_where_it_was(
    joiner: StateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connection is cut after 300 kB: the fifth delivers the rest of 1.2 MB, and the snapshot
    was made once."""
    made: list[float] = []
    starts: list[int] = []
    cut = socket.socket.sendfile

    def state() -> dict[str, Any]:
        made.append(time.monotonic())
        return STATE

    def once(self: socket.socket, file: Any, offset: int = 0, count: int | None = None) -> int:
        starts.append(offset)
        if len(starts) < 5:
            cut(self, file, offset, 300_000)
            raise ConnectionResetError
        return cut(self, file, offset, count)

    monkeypatch.setattr(socket.socket, "sendfile", once)
    donor = StateServer()
    donor.serve(state, messages)
    try:
        assert_whole(joiner.fetch_snapshot(donor.address))
    finally:
        donor.close()
    assert starts == [0, 300_000, 600_000, 900_000, 1_200_000]
    assert len(made) == 1


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("form", ["zip", "pickle"])
def test_code_in_a_state_file_does_not_run(
    form: str, joiner: StateServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The donor is malicious. The file runs its code where it is trusted, so that the test could
    fail."""
    ran, file = tmp_path / "ran", tmp_path / "file"
    if form == "zip":
        torch.save({"weight": Attack(ran)}, file)
    else:
        file.write_bytes(pickle.dumps({"weight": Attack(ran)}))
    content = file.read_bytes()
    monkeypatch.setattr(state_server.torch, "save", lambda _, opened: opened.write(content))
    donor = StateServer()
    donor.serve(lambda: STATE, messages)
    try:
        with pytest.raises(RuntimeError, match="none of it was loaded"):
            joiner.fetch_snapshot(donor.address)
        with pytest.raises(RuntimeError, match="none of it was loaded"):
            joiner.fetch_messages(donor.address, 3)
    finally:
        donor.close()
    assert not ran.exists()
    if form == "zip":
        torch.load(file, weights_only=False)
    else:
        pickle.loads(content)
    assert ran.exists()


def test_a_damaged_snapshot_is_refused(
    donor: StateServer, joiner: StateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = socket.socket.sendfile

    def flipped(self: socket.socket, file: Any, offset: int, count: int) -> int:
        if offset == 0:
            middle = os.fstat(file.fileno()).st_size // 2
            byte = os.pread(file.fileno(), 1, middle)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 1]), middle)
        return sent(self, file, offset, count)

    monkeypatch.setattr(socket.socket, "sendfile", flipped)
    with pytest.raises(ConnectionError, match="SHA-256 does not match"):
        joiner.fetch_snapshot(donor.address)


def test_a_wrong_token_is_refused(
    donor: StateServer, joiner: StateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a token, with the joiner's own, and with the shared one against a random one."""
    for path in (b"/snapshot/ab", b"/messages/3"):
        assert raw(donor, b"GET " + path + b" HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.0 401")
    with pytest.raises(ConnectionError, match="rejected this replica's token"):
        joiner.fetch_snapshot(public_address(donor.address))

    monkeypatch.setenv(TOKEN, "shared")
    first, second = StateServer(), StateServer()
    first.serve(lambda: STATE, messages)
    try:
        assert "shared" not in first.address
        assert first.address == public_address(first.address)
        assert_whole(second.fetch_snapshot(first.address))
        with pytest.raises(ConnectionError, match=f"Set {TOKEN} to the same value"):
            joiner.fetch_messages(first.address, 3)
    finally:
        first.close()
        second.close()


def test_a_donor_that_is_gone_is_an_error_at_once(joiner: StateServer) -> None:
    donor = StateServer()
    donor.serve(lambda: STATE, messages)
    donor.close()
    start = time.monotonic()
    with pytest.raises(ConnectionError, match="is not responding") as error:
        joiner.fetch_snapshot(donor.address)
    assert time.monotonic() - start < 0.8, "less than the patience of 1 s"
    assert donor.token not in str(error.value)


def test_a_donor_that_is_silent_is_an_error_in_time(joiner: StateServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        with pytest.raises(ConnectionError, match="is not responding"):
            joiner.fetch_snapshot(f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert 1.0 < time.monotonic() - start < 4.0


def test_another_program_at_the_address_is_no_donor(
    joiner: StateServer, donor: StateServer
) -> None:
    with pytest.raises(ConnectionError, match="returned status 404"):
        joiner._fetch(donor.address, "/index.html", open(os.devnull, "w+b"))  # noqa: SIM115


def test_anyone_may_read_the_report_and_nothing_else(donor: StateServer) -> None:
    donor.report = lambda: {"step": 7}
    assert json.loads(get_text(public_address(donor.address), "/report", 5.0)) == {"step": 7}
    refused = raw(donor, b"GET /report/../snapshot/ab HTTP/1.0\r\n\r\n")
    assert refused.startswith(b"HTTP/1.0 401")


def files_in(folder: Path) -> list[str]:
    """Open files of this process, also those without a name."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(os.readlink(descriptor))
    return [path for path in found if path.startswith(str(folder))]


def test_snapshots_have_no_names_and_those_of_joiners_that_are_gone_are_removed(
    donor: StateServer, joiner: StateServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process that is killed leaves nothing behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for _ in range(state_server.MAX_SNAPSHOTS + 1):
        joiner.fetch_snapshot(donor.address)
    assert len(files_in(tmp_path)) == state_server.MAX_SNAPSHOTS
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(state_server, "IDLE_SECONDS", 0.0)
    deadline = time.monotonic() + 20.0
    while files_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert files_in(tmp_path) == []


GARBAGE = [
    b"",  # connects and says nothing
    b"\x00\xff" * 40,
    b"GET /snapshot/ab HTTP/1.0\r\nAuthorization: Bearer guess\r\n\r\n",
    b"GET / HTTP/1.0\r\nX: " + b"y" * state_server.MAX_HEAD_BYTES,
    b"POST /snapshot/ab HTTP/1.0\r\nContent-Length: 99999999999\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /snapshot/ab",  # half a request
]


def test_ten_thousand_garbage_connections_change_nothing(
    donor: StateServer, joiner: StateServer
) -> None:
    """They stay open as long as the server lets them, while a joiner downloads."""
    joiner._patience_s = 10.0  # each of the donor's answers may wait for some garbage
    held, before = [], threading.active_count()
    most, state = 0, None
    for number in range(10_000):
        connection = socket.create_connection(where(donor), timeout=10.0)
        connection.sendall(GARBAGE[number % len(GARBAGE)])
        held.append(connection)
        if len(held) > 200:
            held.pop(0).close()
        most = max(most, threading.active_count())
        if number == 5_000:
            state = joiner.fetch_snapshot(donor.address)
    assert state is not None
    assert_whole(state)
    assert most - before <= 50, "connections that say nothing have a thread"
    for connection in held:
        connection.close()
    assert_whole(joiner.fetch_snapshot(donor.address))


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_connections_that_say_nothing_are_closed(
    donor: StateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By age if there are many, else by time; also if a byte arrives now and then."""
    monkeypatch.setattr(state_server, "MAX_PENDING", 2)
    silent = [socket.create_connection(where(donor), timeout=3.0) for _ in range(3)]
    assert silent[0].recv(1) == b""
    for connection in silent:
        connection.close()
    monkeypatch.setattr(state_server, "HEAD_SECONDS", 0.5)
    with socket.create_connection(where(donor), timeout=3.0) as slow:
        slow.setblocking(False)
        start = time.monotonic()
        while not is_closed(slow):
            slow.send(b"G")
            time.sleep(0.1)
        assert 0.4 < time.monotonic() - start < 2.0
