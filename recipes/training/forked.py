"""Work in a forked child, so that this process can fork ranks that use CUDA afterwards."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

T = TypeVar("T")


def without_beginning_cuda(work: Callable[[], T]) -> T:
    """Return what `work` returns, without this process beginning with CUDA.

    1. An optimizer's step asks whether a CUDA graph is being captured, a model of transformers
       whether it is traced. On a machine with GPUs either begins CUDA, tensors on the CPU or not.
    2. Ranks that are forked after that cannot use CUDA.

    So a forked child does the work where torch knows CUDA; elsewhere it is done here.

    Args:
        work: returns what can be pickled and takes one thread: a child must not use OpenMP's
            threads after the parent has.

    Raises:
        Exception: what `work` raised.
        RuntimeError: the child ended without an answer.
    """
    if torch.version.cuda is None or torch.cuda.is_initialized():
        return work()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_play, args=(work, sender))
    child.start()
    sender.close()  # the child has it: if it dies, the receiver notices
    try:
        answer, error = receiver.recv()
    except EOFError:
        child.join()
        text = f"A check in a forked process ended with exit code {child.exitcode} and no answer."
        raise RuntimeError(text) from None
    finally:
        receiver.close()
    child.join()
    if error is not None:
        raise error
    return answer


def _play(work: Callable[[], T], sender: Connection) -> None:
    torch.set_num_threads(1)
    try:
        sender.send((work(), None))
    except Exception as error:  # noqa: BLE001 - raised again where the answer is waited for
        sender.send((None, error))
