"""Replicas meet at torchft's lighthouse: who is in a quorum, and what a death, a restart of the
lighthouse and strangers change."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from http.client import HTTPConnection
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_commfree.elastic import lighthouse, lighthouse_command
from lightning_commfree.elastic.board import ABSENT_STEP, Board, BoardMember, read_board
from lightning_commfree.elastic.lighthouse import LighthouseRendezvous, serve_lighthouse
from lightning_commfree.elastic.membership import DEAD, JOINING, MEMBER, Member, Quorum
from lightning_commfree.elastic.state_server import StateServer
from tests.world import free_port

# not `importorskip`: torchft is first imported by the package, which quiets its log
pytestmark = pytest.mark.skipif(
    find_spec("torchft") is None, reason="needs torchft: `pip install -e '.[elastic]'`"
)

HEARTBEAT_TIMEOUT_S = 2.0


class House:
    """A lighthouse, and replicas that ask it, each on a thread."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.replicas: dict[str, LighthouseRendezvous] = {}
        self.threads = ThreadPoolExecutor()
        self.start()

    def start(self) -> None:
        self.server = serve_lighthouse("127.0.0.1", self.port, 1, 60.0, HEARTBEAT_TIMEOUT_S)

    def stop(self) -> None:
        self.server.shutdown()
        self.server = None  # its connections close with the last reference

    def replica(self, name: str) -> LighthouseRendezvous:
        return self.replicas.setdefault(name, LighthouseRendezvous(self.url, timeout_s=30.0))

    def ask(self, name: str, **record: Any) -> Future[Quorum]:
        return self.threads.submit(self.replica(name).quorum, Member(name, **record))

    def close(self) -> None:
        for replica in self.replicas.values():
            replica.close()
        self.threads.shutdown()
        self.server.shutdown()


@pytest.fixture
def house() -> Iterator[House]:
    found = House()
    yield found
    found.close()


def names(quorum: Quorum) -> list[str]:
    return [member.replica for member in quorum.members]


def together(house: House, *replicas: str, **asked: Future[Quorum]) -> Quorum:
    """Let replicas ask, or go on asking, until all of them are in one quorum."""
    asked = {name: asked.get(name) or house.ask(name) for name in replicas}
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        answers = [future.result() for future in asked.values() if future.done()]
        if len(answers) == len(replicas) and names(answers[0]) == sorted(replicas):
            assert answers.count(answers[0]) == len(answers)
            return answers[0]
        asked |= {name: house.ask(name) for name, future in asked.items() if future.done()}
        time.sleep(0.05)
    raise AssertionError(f"{replicas} do not meet")


def test_records_arrive_whole_at_all_members(house: House) -> None:
    together(house, "a", "b")
    record = Member(
        "b",
        status=JOINING,
        flights=12,
        slot=3,
        view="5.1",
        view_size=2,
        number=5,
        broken=True,
        asked=4,
        settings={"model": "abc"},
        step=120,
        store="10.0.0.2:4000",
        states=("http://:token@10.0.0.2:4001", "http://:token@10.0.0.2:4002"),
    )
    first = house.ask("a", status=MEMBER)
    second = house.threads.submit(house.replica("b").quorum, record)
    assert first.result(10.0) == second.result(10.0)
    assert first.result().members == (Member("a", status=MEMBER), record)


def test_a_member_that_dies_is_missing_after_its_heartbeat(house: House) -> None:
    """And not before: while it sends heartbeats, the others wait for it."""
    before = together(house, "a", "b", "c")
    asked = [house.ask(name) for name in "ab"]
    time.sleep(HEARTBEAT_TIMEOUT_S + 1.0)
    assert not asked[0].done()
    start = time.monotonic()
    house.replica("c").close()
    quorum = asked[0].result(10.0)
    assert quorum == asked[1].result(10.0)
    assert names(quorum) == ["a", "b"]
    assert quorum.number > before.number
    assert read_board(house.url).silent == {"c"}
    assert time.monotonic() - start < HEARTBEAT_TIMEOUT_S + 1.0


def test_nobody_waits_for_a_dead_member_on_whose_behalf_another_one_asks(house: House) -> None:
    """Each request counts as a heartbeat, so without the second one, the others would wait."""
    together(house, "a", "b", "c")
    house.replica("c").close()
    for _ in range(2):
        start = time.monotonic()
        asked = [house.ask(name) for name in "ab"]
        dead = house.threads.submit(house.replica("a").quorum, Member("c", status=DEAD))
        assert names(asked[0].result(10.0)) == ["a", "b", "c"]
        assert asked[0].result() == asked[1].result(10.0) == dead.result(10.0)
        assert time.monotonic() - start < HEARTBEAT_TIMEOUT_S / 2
    asked = [house.ask(name) for name in "ab"]
    assert names(asked[0].result(10.0)) == names(asked[1].result(10.0)) == ["a", "b"]
    assert time.monotonic() - start > HEARTBEAT_TIMEOUT_S * 0.9


def test_a_later_record_replaces_that_of_a_thread_that_waits(house: House) -> None:
    together(house, "a", "b")
    first = house.ask("a", flights=1)
    time.sleep(0.5)
    second = house.ask("a", flights=2)
    time.sleep(0.5)
    answer = house.ask("b").result(10.0)
    assert first.result(10.0) == second.result(10.0) == answer
    assert answer.members[0].flights == 2


def test_a_lighthouse_that_comes_back_counts_from_one(house: House) -> None:
    """Whoever waits while it ends, or asks while it is away, gets an answer afterwards."""
    together(house, "a")
    together(house, "a", "b")
    assert together(house, "a", "b", "c").number == 3
    waiting = house.ask("a")
    time.sleep(0.5)
    house.replica("c").close()
    house.stop()
    asking = house.ask("b")
    time.sleep(1.0)
    assert not waiting.done()
    assert not asking.done()
    house.start()
    assert together(house, "a", "b", a=waiting, b=asking).number <= 2


def test_closing_interrupts_a_thread_that_waits(house: House) -> None:
    together(house, "a", "b")
    waiting = house.ask("a")
    time.sleep(0.5)
    house.replica("a").close()
    with pytest.raises(RuntimeError, match="was closed while this replica waited"):
        waiting.result(2.0)


def test_a_quorum_that_does_not_come_is_an_error(house: House) -> None:
    together(house, "a", "b")
    house.replica("a").timeout_s = 1.0
    with pytest.raises(RuntimeError, match=r"a quorum within 1 s: either another replica is alive"):
        house.ask("a").result(10.0)


@pytest.mark.parametrize("answers", [False, True])
def test_without_a_lighthouse_the_address_is_named(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing listens there, or another program does."""
    monkeypatch.setattr(lighthouse, "_FIRST_CONTACT_S", 1.0)
    other = StateServer()
    other.serve(dict, lambda first: [])
    url = other.address if answers else f"http://127.0.0.1:{free_port()}"
    rendezvous = LighthouseRendezvous(re.sub("://.*@", "://", url))
    start = time.monotonic()
    try:
        with pytest.raises(RuntimeError, match=f"No lighthouse is responding at {rendezvous.url}"):
            rendezvous.quorum(Member("a"))
    finally:
        rendezvous.close()
        other.close()
    assert time.monotonic() - start < 10.0


def test_a_stranger_in_a_quorum_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """Another program at the same lighthouse, and records that are not what they claim to be."""
    record = Member("a", states=("http://10.0.0.2:1",))._asdict()
    strange = [None, {}, {"replica": "s2"}, record, {**record, "replica": "s4", "flights": "9"}]
    found = [SimpleNamespace(replica_id="a", data=record)]
    found += [SimpleNamespace(replica_id=f"s{n}", data=data) for n, data in enumerate(strange)]
    quorum = lighthouse._quorum(SimpleNamespace(quorum_id=3, participants=found))
    assert quorum == Quorum(3, (Member(**record),))
    assert caplog.text.count("Another program is using this lighthouse for its own quorums") == 5


def test_without_torchft_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-commfree\[elastic\]'"):
        LighthouseRendezvous("http://127.0.0.1:29510")


# what an outsider can do


def in_a_process(function: Callable[..., None], *args: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(target=function, args=args, daemon=True)
    process.start()
    return process


def as_torchft(url: str) -> None:
    from torchft.coordination import LighthouseClient, ManagerServer

    second = timedelta(seconds=1)
    server = ManagerServer("victim", url, "127.0.0.1", "127.0.0.1:0", "", 1, second, second, 0)
    LighthouseClient(url, second).quorum("victim", 10 * second, address=server.address())
    time.sleep(10.0)


def as_ours(url: str) -> None:
    states = StateServer()
    states.serve(dict, lambda first: [])
    LighthouseRendezvous(url).quorum(Member("victim", states=(states.address,)))
    time.sleep(10.0)


@pytest.mark.parametrize(("replica", "dies"), [(as_torchft, True), (as_ours, False)])
def test_the_kill_request_does_not_reach_our_replicas(
    replica: Callable[..., None], dies: bool, house: House
) -> None:
    victim = in_a_process(replica, house.url)
    try:
        while not read_board(house.url).members:
            time.sleep(0.1)
        kill = HTTPConnection("127.0.0.1", house.port, timeout=20.0)
        kill.request("POST", "/replica/victim/kill")
        kill.getresponse().read()
        victim.join(2.0)
        assert (victim.exitcode == 1) == dies
        assert victim.is_alive() != dies
    finally:
        victim.kill()
        victim.join()


def test_the_heartbeat_port_has_an_address_that_nobody_can_guess(house: House) -> None:
    """Whoever poses as a replica chooses the address to which the lighthouse sends a kill request.

    From the lighthouse's machine, 127.0.0.1 would reach a replica that runs there.
    """
    rendezvous = house.replica("a")
    house.ask("a").result(10.0)
    port = int(rendezvous._heartbeat.address().rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5.0)
    addresses = {lighthouse._loopback() for _ in range(100)}
    assert len(addresses) > 90
    assert all(address.startswith("127.") for address in addresses)


def test_ten_thousand_garbage_connections_change_nothing(house: House) -> None:
    together(house, "a", "b")
    asked = house.ask("a")
    garbage = [b"", b"\x00\xff" * 40, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 9]
    held = []
    for number in range(10_000):
        connection = socket.create_connection(("127.0.0.1", house.port), timeout=10.0)
        connection.sendall(garbage[number % len(garbage)])
        held.append(connection)
        if len(held) > 200:
            held.pop(0).close()
    assert house.ask("b").result(10.0) == asked.result(10.0)
    assert names(asked.result()) == ["a", "b"]
    for connection in held:
        connection.close()


# the command


def test_the_status_shows_members_joiners_and_what_they_report(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    states = StateServer()
    states.serve(dict, lambda first: [])
    states.report = lambda: {
        "step": 121,
        "steps_per_second": 3.25,
        "stalled_seconds": 1.5,
        "sent_bytes": 2_500_000,
    }
    house.ask("a", step=100, states=(states.address,)).result(10.0)
    house.ask("\x1b[2Jb", step=90).result  # noqa: B018 - joins when "a" asks again
    time.sleep(0.5)
    try:
        assert lighthouse_command.main(["status", house.url, "--once"]) == 0
    finally:
        states.close()
    shown = capsys.readouterr().out
    _, joiner, row = (line.split() for line in shown.strip().splitlines()[1:])
    assert row[:1] + row[2:] == ["a", "s", "ago", "121", "3.25", "1.5", "s", "2.5", "MB"]
    assert joiner[0] == "[2Jb"
    assert joiner[4:] == ["joining", "-", "-", "-"]
    assert states.token not in shown


def test_a_replica_that_left_is_shown_as_gone_for_a_while() -> None:
    heartbeats = {"left": 40.0, "left long ago": 4000.0, "new": 0.4}
    members = (BoardMember("dead", ABSENT_STEP, "http://10.0.0.2:1"),)
    heartbeats["dead"] = 0.1
    board = Board(7, "", members, heartbeats, frozenset({"left", "left long ago"}))
    _, _, dead, left, new = lighthouse_command.table("http://10.0.0.1:29510", board)
    assert dead.split() == ["dead", "0.1", "s", "ago", "gone", "-", "-", "-"]
    assert left.split() == ["left", "40.0", "s", "ago", "gone", "-", "-", "-"]
    assert new.split() == ["new", "0.4", "s", "ago", "joining", "-", "-", "-"]


def test_the_status_of_nothing_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        lighthouse_command.main(["status", f"http://127.0.0.1:{free_port()}", "--once"])
    assert ended.value.code == 2
    assert "No server is responding at http://127.0.0.1" in capsys.readouterr().err


def serve(port: int) -> None:
    os._exit(lighthouse_command.main(["--port", str(port), "--heartbeat-timeout", "2"]))


def test_the_command_serves_until_it_is_terminated() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = in_a_process(serve, port)
    rendezvous = LighthouseRendezvous(url)
    try:
        assert rendezvous.quorum(Member("a")).number == 1
        os.kill(process.pid, signal.SIGTERM)
        process.join(5.0)
        assert process.exitcode == 0
    finally:
        rendezvous.close()
        process.kill()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bind", "203.0.113.9"], "Cannot listen on 203.0.113.9:29510"),
        (["--heartbeat-timeout", "1"], "--heartbeat-timeout 1` is too short"),
        (["--join-timeout", "4"], "--join-timeout 4` is too short"),
        (["--min-replicas", "0"], "`--min-replicas` must be at least 1"),
    ],
)
def test_bad_arguments_are_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        lighthouse_command.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
