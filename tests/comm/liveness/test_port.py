"""A port that answers questions: garbage, strangers, the address, the end of a process."""

from __future__ import annotations

import json
import multiprocessing
import socket
import threading
import time
from contextlib import suppress

import pytest

from lightning_commfree.comm.liveness import PeerWatch, port, questions
from lightning_commfree.comm.liveness import watch as watching
from lightning_commfree.comm.liveness.questions import NoAnswer, PeerAddress
from tests.comm.watches import LONG, Broken, FailsLater, watches


def say(watch: PeerWatch, line: bytes) -> bytes:
    host, number, _ = watch.address.rstrip(b"\0").decode().split(" ")
    with socket.create_connection((host, int(number)), timeout=5.0) as connection:
        answer = b""
        with suppress(OSError):  # closed with our line half read
            connection.sendall(line)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(4096):
                answer += piece
        return answer


def test_garbage_is_ignored_and_a_question_is_answered() -> None:
    with watches(2) as (watch, _):
        key = watch.address.rstrip(b"\0").decode().split(" ")[2]
        for line in (
            b"",
            b"\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff\xfe\n",
            b"[" * 10_000 + b"\n",
            b"7\n",
            b'{"lost": {"1": "is gone"}}\n',
            b'{"key": "another", "lost": {"1": "is gone"}}\n',
            json.dumps({"key": key, "filler": "x" * 100_000}).encode() + b"\n",
        ):
            assert say(watch, line) == b"", line[:40]
        for lost in (None, 3, {"7": "no rank of this channel"}, {}):
            question = json.dumps({"key": key, "lost": lost}).encode() + b"\n"
            assert json.loads(say(watch, question)) == {"launched": 0}, lost
        for left in (None, {"rank": 1}, {"rank": 7, "launched": 1}, {"rank": "1", "launched": 1}):
            say(watch, json.dumps({"key": key, "left": left}).encode() + b"\n")
        assert watch._found.left == {}, "no rank of the channel has said that it leaves"
        with watch.launching("t"):  # so nothing of all this was believed
            pass
        say(watch, json.dumps({"key": key, "lost": {"1": "x" * 1000}}).encode() + b"\n")
        with pytest.raises(RuntimeError, match="rank 1 x{250}[.] ") as caught, watch.launching("t"):
            pytest.fail("a peer has told that rank 1 is lost")
    assert len(str(caught.value)) < 500


def test_somebody_who_connects_and_says_nothing_keeps_nobody_waiting() -> None:
    with watches(2) as (watch, other):
        host, number, _ = watch.address.rstrip(b"\0").decode().split(" ")
        with socket.create_connection((host, int(number))):
            start = time.monotonic()
            with pytest.raises(RuntimeError, match="rank 1 gave up"):
                other.wait([Broken()], "t")
            assert time.monotonic() - start < 2.0


def test_hundreds_who_connect_and_say_nothing_or_little_cost_no_thread_and_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(port, "ANSWER_SECONDS", 2.0)
    with watches(2) as (watch, other):
        host, number, key = watch.address.rstrip(b"\0").decode().split(" ")
        threads = threading.active_count()
        start = time.monotonic()
        callers = [socket.create_connection((host, int(number))) for _ in range(400)]
        for caller in callers[::2]:
            with suppress(OSError):  # hung up already: the oldest are
                caller.sendall(b'{"key": ')
        asked = time.monotonic()
        assert other.told("t") == {0: {}}
        assert time.monotonic() - asked < 3.0
        assert threading.active_count() <= threads, "none for all of them"
        for caller in callers:
            caller.settimeout(10.0)
            with suppress(ConnectionError):
                assert caller.recv(1) == b"", "an end, and no answer"
            caller.close()
        assert time.monotonic() - start < 10.0
        question = json.dumps({"key": key}).encode() + b"\nand more"
        assert json.loads(say(watch, question)) == {"launched": 0}


def test_an_answer_that_is_dealt_out_byte_by_byte_is_not_waited_for() -> None:
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()

        def drip() -> None:
            connection, _ = foreign.accept()
            with connection, suppress(OSError):
                for _ in range(100):
                    connection.sendall(b"x")
                    time.sleep(0.1)

        threading.Thread(target=drip, daemon=True).start()
        start = time.monotonic()
        silence = questions.ask(PeerAddress("127.0.0.1", foreign.getsockname()[1], "k"), {}, 0.5)
        assert isinstance(silence, NoAnswer)
        assert not silence.gone
        assert time.monotonic() - start < 3.0


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"{}\n", b"[7]\n"])
def test_another_program_at_a_lost_ranks_address_is_not_taken_for_it(said: bytes) -> None:
    with watches(2) as (watch, other), socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        other.close()
        watch.meet({1: f"127.0.0.1 {foreign.getsockname()[1]} 12345678".encode()})

        def chat() -> None:
            connection, _ = foreign.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(said)

        threading.Thread(target=chat, daemon=True).start()
        with pytest.raises(RuntimeError, match="rank 1 is gone [(]another program"):
            watch.wait([Broken()], "t")


def test_it_listens_where_gloo_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def host() -> str:
        watch = PeerWatch(0, LONG)
        watch.close()
        return watch.address.rstrip(b"\0").decode().split(" ")[0]

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert host() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "absent0,lo")
    assert host() == "127.0.0.1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert host() in ("127.0.0.1", "::1")
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert host() == "127.0.0.1"


def test_a_rank_without_an_address_cannot_be_asked_and_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "absent0")
    silent = PeerWatch(1, LONG)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    watch = PeerWatch(0, LONG)
    watch.meet({0: watch.address, 1: silent.address})
    with pytest.raises(RuntimeError, match="rank 0 gave up .* ranks that could be asked answer"):
        watch.wait([Broken()], "t")
    silent.close()
    watch.close()


def end_without_closing() -> None:
    PeerWatch(0, LONG)


def close_what_the_parent_opened(watch: PeerWatch) -> None:
    watch.close()


def test_it_holds_up_neither_the_end_of_a_process_nor_a_fork() -> None:
    context = multiprocessing.get_context("fork")
    with watches(2) as (watch, other):
        for process in (
            context.Process(target=end_without_closing),
            context.Process(target=close_what_the_parent_opened, args=(watch,)),
        ):
            process.start()
            process.join(timeout=5.0)
            exit_code = process.exitcode
            process.kill()
            assert exit_code == 0
        with pytest.raises(RuntimeError, match="rank 1 gave up"):  # rank 0 goes on answering
            other.wait([Broken()], "t")


def test_a_rank_that_dies_after_it_has_answered_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it said while it lived says nothing of now."""
    monkeypatch.setattr(watching, "ANSWER_SECONDS", 0.5)
    with watches(2) as (watch, other):
        asked, ask = [], watch._ask
        monkeypatch.setattr(watch, "_ask", lambda *a, **k: asked.append(ask(*a, **k)) or asked[-1])
        with pytest.raises(RuntimeError, match=r"by peer\): rank 1 is gone"):
            watch.wait([FailsLater(2.0, other._listener.close)], "t")
    assert any(answers.launched == {1: 0} for answers in asked), "it lived when it was asked first"
