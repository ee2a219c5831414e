"""What would begin CUDA in a process that forks ranks later is done in a child."""

from __future__ import annotations

import os

import pytest
import torch

from recipes.training.forked import without_initializing_cuda


@pytest.fixture
def cuda_build(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def fail() -> None:
    raise ValueError("the model does not keep examples apart")


def test_a_child_does_the_work_and_its_answer_comes_back(cuda_build) -> None:
    seen = [1]
    before = torch.get_num_threads()
    torch.set_num_threads(2)

    def work() -> tuple[int, list[int], int]:
        seen.append(2)
        return os.getpid(), seen, torch.get_num_threads()

    try:
        pid, in_child, threads = without_initializing_cuda(work)
    finally:
        torch.set_num_threads(before)
    assert pid != os.getpid()
    assert (seen, in_child) == ([1], [1, 2])
    assert threads == 1, "OpenMP's threads hang in a child of a process that has used them"


def test_an_error_of_the_child_is_raised_here(cuda_build) -> None:
    with pytest.raises(ValueError, match="does not keep examples apart"):
        without_initializing_cuda(fail)


def test_a_child_that_dies_is_not_waited_for(cuda_build) -> None:
    with pytest.raises(RuntimeError, match="ended with exit code 3 and no answer"):
        without_initializing_cuda(lambda: os._exit(3))


def test_elsewhere_nothing_is_forked(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert without_initializing_cuda(os.getpid) == os.getpid()
