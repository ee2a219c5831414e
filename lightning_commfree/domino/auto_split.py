"""Choose the fastest split for each batch size by timing, for `split="auto"`.

Whether a split pays off depends on the batch, the model, the processor and the network link: two
half batches take longer to compute than one full batch, and the extra time may exceed what hidden
communication saves. So the first batches of each size try the possible splits in turn, until each
split has been timed for `PASSES` passes. Later batches of that size use the split with the shortest
median time on the slowest rank. Checkpoints contain the choices and timings.

A pass is timed from the start of the first block's forward pass to the end of its backward pass.
That includes the loss, where ranks wait for each other if they finish their blocks at different
times.

Tensor groups may choose different splits, because a split changes only the order in which gradients
are added.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.handshake import TAG as HANDSHAKE_TAG
from lightning_commfree.comm.text import plain
from lightning_commfree.domino.schedule import ScheduleRun
from lightning_commfree.domino.sublayers import Arguments

WARM_UP = 1  # the first pass of a split allocates memory, and is not timed
# The time of a pass varies by 10 to 20%. In a simulation with 14% variation, nine passes choose the
# slower of two splits in 27% of cases if the splits differ by 5%, in 12% at 10%, and in 2% at 20%:
# an average loss of at most 1.4%. More passes would delay the choice.
PASSES = 9
MAX_SIZES = 8  # maximum number of sizes to time; other sizes use the choice of the nearest one


class Size(NamedTuple):
    """Batch size: rows, and tokens per row rounded up to a power of two."""

    rows: int
    tokens: int  # rounded, because batches may be padded to any length; timings are per token

    @classmethod
    def of(cls, hidden: Tensor) -> Size:
        """Return the size of a batch whose hidden state has shape (B, T, H)."""
        rows, tokens = hidden.shape[:2]
        return cls(rows, 1 << max(tokens - 1, 0).bit_length())


class SplitTrial:
    """Times each split for each batch size of a tensor group, and chooses the fastest."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._best: dict[Size, str] = {}
        self._seconds: dict[Size, dict[str, list[float]]] = {}  # per token, pass by pass
        self.now: Callable[[], float] = time.perf_counter  # in seconds
        self.on_choice: Callable[[str], None] = lambda _: None  # gets a message about each choice

    def choose(
        self,
        size: Size,
        # returns the possible splits, "none" first; called only when needed, because it may read a
        # mask, which synchronizes the device
        get_legal: Callable[[], Sequence[str]],
    ) -> tuple[str, bool]:
        """Return the split to use for a batch, and whether to time this pass; may be collective.

        While a size is being timed, the splits take turns. After `WARM_UP` + `PASSES`
        passes of each, a collective determines the fastest one, and later calls return it.
        """
        if self._channel.size == 1:  # no communication to hide
            return "none", False
        best = self._best.get(size)
        if best is None and size not in self._seconds and len(self._seconds) >= MAX_SIZES:
            best = self._nearest(size)
        if best == "none" or (best == "batch" and size.rows > 1):  # legal for every such batch
            return best, False

        names = get_legal()
        if best is None:
            if len(names) == 1:
                return names[0], False
            seconds = self._seconds.setdefault(size, {name: [] for name in names})
            turn = min(seconds, key=lambda name: len(seconds[name]))
            if len(seconds[turn]) < WARM_UP + PASSES:
                # this split may be impossible if the mask differs from the first batch's
                return (turn, True) if turn in names else ("none", False)
            best = self._decide(size, seconds)
        return (best if best in names else names[-1]), False

    def timed(self, run: ScheduleRun, split: str, hidden: Tensor) -> TimedRun:
        """Return `run` as a `TimedRun`: it records its time for the split and `hidden`'s size."""
        seconds, tokens = self._seconds[Size.of(hidden)][split], hidden.shape[0] * hidden.shape[1]

        def synchronized_now() -> float:
            if hidden.is_cuda:  # else only kernel launches would be timed
                torch.cuda.synchronize(hidden.device)
            return self.now()

        return TimedRun(run, synchronized_now, lambda duration: seconds.append(duration / tokens))

    def state_dict(self) -> dict[str, Any]:
        """Return the choices and timings as plain values."""
        return {
            "best": [(*size, name) for size, name in self._best.items()],
            "seconds": [(*size, seconds) for size, seconds in self._seconds.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self._best = {Size(rows, tokens): name for rows, tokens, name in state["best"]}
        self._seconds = {
            Size(rows, tokens): {name: [*passes] for name, passes in seconds.items()}
            for rows, tokens, seconds in state["seconds"]
        }

    def _decide(self, size: Size, seconds: dict[str, list[float]]) -> str:
        """Choose, record and report the split that is fastest on the slowest rank; collective."""
        medians = torch.tensor([median(passes[WARM_UP:]) for passes in seconds.values()])
        by_rank = self._channel.all_gather(medians.to(self._channel.device), HANDSHAKE_TAG).wait()
        slowest = dict(zip(seconds, by_rank.amax(0).tolist(), strict=True))
        best = self._best[size] = min(slowest, key=slowest.__getitem__)

        tokens = size.rows * size.tokens
        times = ", ".join(f"{name} {plain(1e3 * tokens * s)} ms" for name, s in slowest.items())
        self.on_choice(
            f"`split='auto'` chose {best!r} for batches of {size.rows} x {size.tokens} tokens."
            f" Forward, loss and backward took: {times}."
        )
        return best

    def _nearest(self, size: Size) -> str:
        """Return the choice for the size with the most similar number of tokens, else "none"."""

        def token_ratio(known: Size) -> float:
            ratio = known.rows * known.tokens / (size.rows * size.tokens)
            return max(ratio, 1 / ratio)

        return self._best[min(self._best, key=token_ratio)] if self._best else "none"


class TimedRun:
    """A `ScheduleRun` that reports the time from the start of forward to the end of backward."""

    def __init__(
        self, run: ScheduleRun, now: Callable[[], float], report: Callable[[float], None]
    ) -> None:
        self._run, self._now, self._report = run, now, report

    def forward(self, hidden: Tensor, arguments: Sequence[Arguments]) -> Tensor:
        """Record the start time, run forward and return its output."""
        self._start = self._now()
        return self._run.forward(hidden, arguments)

    def backward(self, gradient: Tensor) -> Tensor:
        """Run backward, report the elapsed time and return the gradient of the input."""
        gradient = self._run.backward(gradient)
        self._report(self._now() - self._start)
        return gradient
