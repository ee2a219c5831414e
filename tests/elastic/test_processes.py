"""What is known about a process of the same machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

import pytest

from lightning_commfree.elastic.processes import has_ended, this_process

FORK = multiprocessing.get_context("fork")

pytestmark = pytest.mark.skipif(not this_process(), reason="needs /proc")


def introduce(pipe: Connection) -> None:
    pipe.send(this_process())
    time.sleep(60)


def test_a_killed_process_has_ended_also_before_it_is_reaped() -> None:
    here, there = FORK.Pipe()
    child = FORK.Process(target=introduce, args=(there,))
    child.start()
    name = here.recv()
    assert name != this_process()
    assert not has_ended(name)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    assert not has_ended(name)
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays in the table
    assert has_ended(name)
    child.join()
    assert has_ended(name)


def test_a_process_that_got_the_number_of_another_is_not_that_one() -> None:
    *before, began = this_process().split(" ")
    assert has_ended(" ".join([*before, str(int(began) - 1)]))


@pytest.mark.parametrize("name", ["", "nonsense", "another-boot/pid:[1] 1 2", "a b c d e"])
def test_of_other_processes_nothing_is_known(name: str) -> None:
    assert not has_ended(name)


def test_a_process_of_another_machine_is_not_looked_for() -> None:
    machine, pid, began = this_process().split(" ")
    assert not has_ended(f"{machine}0 {pid} {int(began) - 1}")
