"""Run a function in a forked child, so that this process stays able to fork CUDA ranks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

T = TypeVar("T")


def without_initializing_cuda(work: Callable[[], T]) -> T:
    """Return the result of `work` without initializing CUDA in this process.

    1. An optimizer's step checks whether a CUDA graph is being captured, a model of transformers
       whether it is being traced. On a machine with GPUs both initialize CUDA, even for tensors on
       the CPU.
    2. Ranks that are forked after that cannot use CUDA.

    So a forked child runs `work` if torch is built with CUDA; otherwise this process does.

    Args:
        work: returns a picklable result and uses one thread, because a child must not use OpenMP's
            threads after its parent has.

    Raises:
        Exception: raised by `work`.
        RuntimeError: the child ended without a result.
    """
    if torch.version.cuda is None or torch.cuda.is_initialized():
        return work()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(work, sender))
    child.start()
    sender.close()  # only the child keeps it open: if it dies, the receiver gets EOF
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


def _child(work: Callable[[], T], sender: Connection) -> None:
    torch.set_num_threads(1)
    try:
        sender.send((work(), None))
    except Exception as error:  # noqa: BLE001 - raised again in the parent
        sender.send((None, error))
