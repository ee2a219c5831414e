"""Which split is fastest here: `split="auto"` tries those that are legal, and keeps the best.

Whether a split pays depends on the batch, the model, the processor and the link: products of half
a batch take more than half the time, and what they hide may be less. So the first batches of each
size are trained in turns by every legal split, each pass of the stack is timed, and the smallest
median wins. A pass is forward and backward of the blocks, its waiting included; the seconds of the
slowest rank count, so that all ranks of a tensor group choose alike. Other tensor groups choose for
themselves: a split changes the order in which gradients are added, and nothing else.

A size is the rows of a batch and its tokens, these up to the next power of two, for batches may be
padded to any length: times are those of a token. What is chosen lies in the checkpoint, and so does
what has been measured: a resumed fit goes on with it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.handshake import TAG as HANDSHAKE_TAG
from lightning_commfree.domino.micro_sublayer import Arguments
from lightning_commfree.domino.schedule import ScheduleRun

WARM_UP = 1  # the first pass of a split allocates
ROUNDS = 9
MOST_SIZES = 8  # tried; what else comes does as the nearest one


class Size(NamedTuple):
    """Rows of a batch, and the tokens of each up to the next power of two."""

    rows: int
    tokens: int

    @classmethod
    def of(cls, hidden: Tensor) -> Size:
        """Return that of a batch, shape (B, T, H)."""
        rows, tokens = hidden.shape[:2]
        return cls(rows, 1 << max(tokens - 1, 0).bit_length())


class SplitTrial:
    """What has been measured, and chosen.

    Args:
        channel: to the tensor group.

    Attributes:
        now: the clock, in seconds.
        chosen: told of every choice, in a sentence.
        trying: the split whose pass is being timed.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._best: dict[Size, str] = {}
        # seconds of a token, by split
        self._seconds: dict[Size, dict[str, list[float]]] = {}
        self.now: Callable[[], float] = time.perf_counter
        self.chosen: Callable[[str], None] = lambda _: None
        self.trying: str | None = None

    def choose(self, size: Size, legal: Callable[[], Sequence[str]]) -> tuple[str, bool]:
        """Return a batch's split, and whether its pass is to be timed; collective once a size.

        Args:
            size: of the batch.
            legal: finds its splits, "none" among them; asked while a size is tried.
        """
        if self._channel.size == 1:  # no sums, nothing to hide
            return "none", False
        best = self._best.get(size)
        if best is None and size not in self._seconds and len(self._seconds) >= MOST_SIZES:
            nearest = min(self._best, key=lambda known: _apart(known, size), default=None)
            best = "none" if nearest is None else self._best[nearest]
        if best == "token" or (best == "batch" and size.rows < 2):
            # another mask than that of the batches before, or another number of rows
            return (best if best in legal() else legal()[-1]), False
        if best is not None:
            return best, False

        names = legal()
        if len(names) == 1:
            return names[0], False
        seconds = self._seconds.setdefault(size, {name: [] for name in names})
        turns = [name for name in seconds if len(seconds[name]) < WARM_UP + ROUNDS]
        if not turns:
            return self._decide(size), False

        turn = min(turns, key=lambda name: len(seconds[name]))
        return (turn, True) if turn in names else ("none", False)

    def timed(self, run: ScheduleRun, name: str, hidden: Tensor) -> TimedRun:
        """Return a run of a batch, shape (B, T, H), that is timed as a pass of split `name`."""
        size, tokens = Size.of(hidden), hidden.shape[0] * hidden.shape[1]

        def passed(seconds: float) -> None:
            self._seconds[size][name].append(seconds / tokens)
            self.trying = None

        self.trying = name
        return TimedRun(run, self._clock(hidden.device), passed)

    def state_dict(self) -> dict[str, Any]:
        """Return what has been measured and chosen; plain values."""
        return {
            "best": [(*size, name) for size, name in self._best.items()],
            "seconds": [(*size, seconds) for size, seconds in self._seconds.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        self._best = {Size(rows, tokens): name for rows, tokens, name in state["best"]}
        self._seconds = {
            Size(rows, tokens): {name: [*values] for name, values in seconds.items()}
            for rows, tokens, seconds in state["seconds"]
        }

    def _decide(self, size: Size) -> str:
        medians = {
            name: statistics.median(values[WARM_UP:])
            for name, values in self._seconds[size].items()
        }
        own = torch.tensor([*medians.values()], dtype=torch.float32, device=self._channel.device)
        ranks = self._channel.all_gather(own, HANDSHAKE_TAG).wait()
        slowest = dict(zip(medians, ranks.amax(0).tolist(), strict=True))

        best = min(slowest, key=lambda name: slowest[name])
        self._best[size] = best
        tokens = size.rows * size.tokens
        times = ", ".join(f"{name} {1e3 * tokens * s:.3g} ms" for name, s in slowest.items())
        self.chosen(
            f"`split='auto'`: batches of {size.rows} x {size.tokens} tokens are split by"
            f" {best!r}. Forward and backward of the blocks took: {times}."
        )
        return best

    def _clock(self, device: torch.device) -> Callable[[], float]:
        def now() -> float:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return self.now()

        return now


class TimedRun:
    """A `ScheduleRun` that says how long it has taken, forward and backward.

    Args:
        run: what is timed.
        now: the clock, in seconds.
        passed: told of the seconds behind backward; not told if there is none.
    """

    def __init__(
        self, run: ScheduleRun, now: Callable[[], float], passed: Callable[[float], None]
    ) -> None:
        self._run, self._now, self._passed = run, now, passed
        self._seconds = 0.0

    def forward(self, hidden: Tensor, arguments: Sequence[Arguments]) -> Tensor:
        """See `ScheduleRun`."""
        begun = self._now()
        output = self._run.forward(hidden, arguments)
        self._seconds = self._now() - begun
        return output

    def backward(self, gradient: Tensor) -> Tensor:
        """See `ScheduleRun`."""
        begun = self._now()
        gradient = self._run.backward(gradient)
        self._passed(self._seconds + self._now() - begun)
        return gradient


def _apart(size: Size, other: Size) -> float:
    tokens, others = size.rows * size.tokens, other.rows * other.tokens
    return max(tokens, others) / min(tokens, others)
