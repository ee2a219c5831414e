"""Which rank a watch blames, and when: watches of several ranks in one process, on a real store."""

from __future__ import annotations

import multiprocessing
import pickle
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from lightning_commfree.comm import liveness
from lightning_commfree.comm.liveness import AgreedError, PeerLostError, PeerWatch
from tests.comm.watches import Broken, Endless, FailsLater, fall_silent, watches


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(liveness, "SUSPECT_SECONDS", 0.2)
    monkeypatch.setattr(liveness, "GONE_SECONDS", 1.0)
    monkeypatch.setattr(liveness, "HUNG_SECONDS", 2.0)


def took(start: float) -> float:
    return time.monotonic() - start


def test_a_broken_exchange_among_living_ranks_is_put_down_to_the_network() -> None:
    with watches(2) as (watch, other):
        with pytest.raises(PeerLostError) as caught:
            watch.wait([Broken()], "t")
        assert "(Connection closed by peer): rank 0 gave up on 't'" in str(caught.value)
        assert "all ranks are alive" in str(caught.value)
        assert "`timeout` must be more than twice as long as an outage" in str(caught.value)
        assert list(caught.value.ranks) == [0]
        with pytest.raises(PeerLostError, match="rank 0 gave up on 't'"):
            other.wait([Endless()], "u")


def test_the_first_verdict_stays() -> None:
    with watches(3) as (watch, other, third):
        third.close(owner=True)
        for _ in range(2):
            with pytest.raises(PeerLostError, match="rank 2 is gone"):
                watch.wait([Broken()], "t")
        time.sleep(0.3)
        watch.close(owner=True)
        with (
            pytest.raises(PeerLostError, match="rank 2 is gone") as caught,
            other.launching("u"),
        ):
            pytest.fail("nothing is launched on a group that is known to be broken")
    assert list(caught.value.ranks) == [2]


def test_a_death_that_gloo_overlooks_is_found() -> None:
    with watches(3) as (watch, other, third):
        fall_silent(other)
        start = time.monotonic()
        with pytest.raises(PeerLostError, match="rank 1 is gone"), watch.launching("t"):
            watch.wait([Endless()], "t")
        assert took(start) < 5.0
        with pytest.raises(PeerLostError, match="rank 1 is gone"):
            third.wait([Endless()], "t")


def test_a_silent_machine_is_waited_for_because_its_link_may_be_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = iter(["first", "first", "second"])
    monkeypatch.setattr(socket, "gethostname", lambda: next(hosts))
    with watches(3, timedelta(seconds=4)) as (watch, _, far):
        fall_silent(far)
        start = time.monotonic()
        with pytest.raises(PeerLostError, match=r"timed out\): rank 2 is gone"):
            watch.wait([Endless()], "t")
        assert 4.0 <= took(start) < 5.0


def test_a_rank_that_dies_after_the_last_look_is_named() -> None:
    """Its heartbeats from before the failure say nothing."""
    with (
        watches(2) as (watch, other),
        pytest.raises(PeerLostError, match=r"by peer\): rank 1 is gone"),
    ):
        watch.wait([FailsLater(1.0, lambda: fall_silent(other))], "t")


def test_a_rank_that_took_its_part_and_left_may_still_have_bytes_on_the_wire() -> None:
    with watches(2, timedelta(seconds=2)) as (watch, other):
        with watch.launching("t"), other.launching("t"):
            pass
        other.close(owner=True)
        start = time.monotonic()
        with pytest.raises(PeerLostError, match="timed out"):
            watch.wait([Endless()], "t")
        assert took(start) >= 2.0
    with watches(2) as (watch, other):
        with watch.launching("t"):
            other.close(owner=True)  # before it took part
        start = time.monotonic()
        with pytest.raises(PeerLostError, match=r"a rank has left\): rank 1 is gone"):
            watch.wait([Endless()], "t")
        assert took(start) < 2.0


def test_rank_0_may_end_first_and_take_the_store_with_it() -> None:
    with watches(2) as (first, last):
        first.close(owner=True)
        time.sleep(0.5)
        assert last.monitor is not None
        assert not last.monitor.runs, "it does not touch a store that is about to end"
        assert not last.monitor.store_error
        ended: list[Any] = []
        last.wait([EndsAfter(0.5, ended)], "t")
        assert ended


class EndsAfter(Endless):
    """A collective that ends well after some seconds."""

    def __init__(self, seconds: float, ended: list[Any]) -> None:
        self._end, self._ended = time.monotonic() + seconds, ended

    def is_completed(self) -> bool:
        return time.monotonic() > self._end

    def wait(self, timeout: timedelta) -> None:
        if not self.is_completed():
            super().wait(timeout)
        self._ended.append(True)


def test_a_collective_that_ends_just_in_time_has_ended() -> None:
    class JustInTime(Endless):
        """It ends well right after the first wait for it has given up."""

        waits = 0

        def is_completed(self) -> bool:
            return self.waits > 0

        def wait(self, timeout: timedelta) -> None:
            self.waits += 1
            if self.waits == 1:
                super().wait(timeout)

    with watches(2) as (watch, _):
        work = JustInTime()
        watch.wait([work], "t")
        assert work.waits == 2


# Errors that are no lost rank


def test_an_error_of_a_computation_passes_unless_a_rank_is_lost() -> None:
    with watches(2) as (watch, other):
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="^own$"), watch.naming_lost("step", computing=True):
            raise RuntimeError("own")
        assert took(start) < 0.8, "two heartbeats of all others clear them"
        with watch.naming_lost("step", computing=True):
            pass  # and no other rank was told of a loss
        other.close(owner=True)
        with (
            pytest.raises(PeerLostError, match="'step' failed.*reset.*rank 1 is gone"),
            watch.naming_lost("step", computing=True),
        ):
            raise RuntimeError("Connection reset by peer")
    with watches(2) as (watch, other):
        other.close(owner=True)
        with (
            pytest.raises(PeerLostError, match="'barrier' failed.*rank 1 is gone") as caught,
            watch.naming_lost("step", computing=True),
            watch.naming_lost("barrier"),
        ):
            raise RuntimeError("Connection reset by peer")
        assert "'step'" not in str(caught.value), "it is named once"


def test_an_error_that_all_ranks_raise_blames_no_rank_that_has_left_by_it() -> None:
    with watches(2) as (watch, other):
        other.close(owner=True)
        with pytest.raises(AgreedError, match="^not finite$"), watch.naming_lost("step"):
            raise AgreedError("not finite")


def test_the_error_survives_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(PeerLostError("rank 1 is gone", {1: "is gone"})))
    assert (str(error), error.ranks) == ("rank 1 is gone", {1: "is gone"})


# Statuses, threads and forks


def test_a_status_reaches_all_ranks() -> None:
    with watches(3) as (_, other, third):
        other.publish(lambda: "data ended after step 7")
        seen: list[dict[int, Any]] = []

        def behind(said: Mapping[int, Any]) -> dict[int, str]:
            seen.append(dict(said))
            return {} if said[1] else {1: "has published nothing"}

        third.wait_for(behind, "t")
        assert seen[-1] == {0: "", 1: "data ended after step 7"}


def test_an_error_of_one_rank_ends_the_waits_of_all() -> None:
    with watches(3) as (watch, other, third):
        error = other.agreed("data of rank 1 ended")
        assert isinstance(error, AgreedError)
        with pytest.raises(AgreedError, match="^data of rank 1 ended$"):
            watch.wait([Endless()], "t")
        with pytest.raises(AgreedError, match="^data of rank 1 ended$"):
            watch.check("step")
        assert str(third.agreed("data of rank 2 ended")) == "data of rank 1 ended", "the first one"
        third.close(owner=True)
        with pytest.raises(AgreedError, match="^data of rank 1 ended$"), watch.naming_lost("step"):
            pytest.fail("no rank is called lost")


def test_a_thread_that_still_waits_at_the_close_ends_and_blames_no_rank() -> None:
    with watches(2) as (watch, other), ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(watch.wait, [Endless()], "t")
        time.sleep(0.2)
        watch.close(owner=True)
        with pytest.raises(RuntimeError, match="^the channel was closed on this rank"):
            waiting.result(3.0)
        with other.launching("u"):
            pass


def close_in_a_child(watch: PeerWatch) -> None:
    watch.close(owner=True)


def test_a_forked_child_that_closes_it_tells_nobody() -> None:
    with watches(2) as (watch, other):
        child = multiprocessing.get_context("fork").Process(target=close_in_a_child, args=(other,))
        child.start()
        child.join(timeout=5.0)
        exit_code = child.exitcode
        child.kill()
        assert exit_code == 0
        with pytest.raises(PeerLostError, match="rank 0 gave up"):  # rank 1 beats as before
            watch.wait([Broken()], "t")


def test_a_single_rank_and_liveness_off_pass_errors_as_they_are() -> None:
    watch = PeerWatch([0, 1], 0)
    with pytest.raises(RuntimeError, match="^own$"), watch.launching("t"):
        raise RuntimeError("own")
    watch.publish(str)
    watch.wait_for(lambda said: {1: "is never asked"}, "t")
    watch.check("t")
    with pytest.raises(AgreedError, match="^own$"):
        raise watch.agreed("own")
    watch.close(owner=True)
