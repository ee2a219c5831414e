"""Whom a watch blames where more than an exchange can fail, and after it was closed."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.comm.watches import Endless, watches


def test_an_error_of_a_computation_stays_what_it_is_unless_a_rank_is_lost() -> None:
    with watches(2) as (watch, other):
        with pytest.raises(RuntimeError, match="^own$"), watch.naming("step", computing=True):
            raise RuntimeError("own")
        with watch.naming("step", computing=True):
            pass  # and nobody was told of a loss
        other.close()
        with (
            pytest.raises(RuntimeError, match="'step' failed.*reset.*rank 1 is gone"),
            watch.naming("step", computing=True),
        ):
            raise RuntimeError("Connection reset by peer")
    with watches(2) as (watch, other):
        other.close()
        with (
            pytest.raises(RuntimeError, match="'barrier' failed.*rank 1 is gone") as caught,
            watch.naming("step", computing=True),
            watch.naming("barrier"),
        ):
            raise RuntimeError("Connection reset by peer")
        assert "'step'" not in str(caught.value), "it is named once"


def test_an_error_that_all_ranks_raise_blames_nobody_who_has_left_by_it() -> None:
    text = "Gradients are not finite. All ranks stop; no parameter was changed."
    with watches(2) as (watch, other):
        other.close()
        with pytest.raises(RuntimeError) as caught, watch.naming("step", computing=True):
            raise RuntimeError(text)
        assert str(caught.value) == text


def test_a_thread_that_still_waits_at_the_close_ends_and_blames_nobody() -> None:
    with watches(2) as (watch, other), ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(watch.wait, [Endless()], "t")
        time.sleep(0.2)
        watch.close()
        with pytest.raises(RuntimeError, match="^the channel was closed on this rank"):
            waiting.result(3.0)
        with other.launching("u"):
            pass  # it was not told that anybody is lost
