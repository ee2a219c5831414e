"""Which split is fastest here: `split="auto"` tries those that are legal, and keeps the best.

Whether a split pays depends on the batch, the model, the processor and the link: products of half
a batch take more than half the time, and what they hide may be less. So the first batches of each
size are trained in turns by every legal split, and each pass is timed: from before the forward of
the first block to behind its backward, with all that lies between. That includes the loss: ranks
that leave the blocks apart wait for each other there, and the blocks alone have shown a tie where
whole passes differed by 4 %. The seconds of the slowest rank count, so that all ranks of a tensor
group choose alike. Other tensor groups choose for themselves: a split changes the order in which
gradients are added, and nothing else.

It is a race. After 9, 18, 36, ... passes of each, splits that are surely slower than the best one
leave it, and it is over when one is left, or when all that are left are within 2 %. Passes vary by
10 to 20 %: nine of each choose wrongly where splits differ by 5 %, and a split that is much slower
need not be tried for longer. Every pass trains, so a long race between splits that are nearly as
fast costs little.

A size is the rows of a batch and its tokens, these up to the next power of two, for batches may be
padded to any length: times are those of a token. What is chosen lies in the checkpoint, and so does
what has been measured: a resumed fit goes on with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.handshake import TAG as HANDSHAKE_TAG
from lightning_commfree.domino.schedule import ScheduleRun
from lightning_commfree.domino.sublayers import Arguments

WARM_UP = 1  # the first pass of a split allocates
CHECKS = (9, 18, 36, 72, 144)  # passes of each split after which some may leave the race
SURE = 2.0  # standard errors
CLOSE = 0.02  # of the best one's seconds: as good
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


@dataclass
class _Race:
    """What has been measured for a size."""

    seconds: dict[str, list[float]]  # of a token, pass by pass, by split; those still in the race
    checks: int = 0  # that have been

    def due(self) -> bool:
        """Return whether all have the passes of the next check."""
        return min(map(len, self.seconds.values())) >= WARM_UP + CHECKS[self.checks]

    def turn(self) -> str:
        """Return whose pass is next; each round begins with another one."""
        rounds = min(map(len, self.seconds.values()))
        behind = [name for name, seconds in self.seconds.items() if len(seconds) == rounds]
        return behind[rounds % len(behind)]


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
        self._races: dict[Size, _Race] = {}
        self.now: Callable[[], float] = time.perf_counter
        self.chosen: Callable[[str], None] = lambda _: None
        self.trying: str | None = None

    def choose(self, size: Size, legal: Callable[[], Sequence[str]]) -> tuple[str, bool]:
        """Return a batch's split, and whether its pass is to be timed; some are collective.

        Args:
            size: of the batch.
            legal: finds its splits, "none" among them; asked while a size is tried.
        """
        if self._channel.size == 1:  # no sums, nothing to hide
            return "none", False
        best = self._best.get(size)
        if best is None and size not in self._races and len(self._races) >= MOST_SIZES:
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
        race = self._races.setdefault(size, _Race({name: [] for name in names}))
        if race.due() and (winner := self._check(size, race)) is not None:
            return (winner if winner in names else "none"), False

        turn = race.turn()
        return (turn, True) if turn in names else ("none", False)

    def timed(self, run: ScheduleRun, name: str, hidden: Tensor) -> TimedRun:
        """Return a run of a batch, shape (B, T, H), that is timed as a pass of split `name`."""
        size, tokens = Size.of(hidden), hidden.shape[0] * hidden.shape[1]

        def passed(seconds: float) -> None:
            self._races[size].seconds[name].append(seconds / tokens)
            self.trying = None

        self.trying = name
        return TimedRun(run, self._clock(hidden.device), passed)

    def state_dict(self) -> dict[str, Any]:
        """Return what has been measured and chosen; plain values."""
        return {
            "best": [(*size, name) for size, name in self._best.items()],
            "races": [(*size, race.seconds, race.checks) for size, race in self._races.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        self._best = {Size(rows, tokens): name for rows, tokens, name in state["best"]}
        self._races = {
            Size(rows, tokens): _Race({name: [*each] for name, each in seconds.items()}, checks)
            for rows, tokens, seconds, checks in state["races"]
        }

    def _check(self, size: Size, race: _Race) -> str | None:
        """Let slower splits leave the race; return who has won it; collective."""
        passes = CHECKS[race.checks]
        own = [seconds[WARM_UP : WARM_UP + passes] for seconds in race.seconds.values()]
        sent = torch.tensor(own, dtype=torch.float32, device=self._channel.device)
        slowest = self._channel.all_gather(sent, HANDSHAKE_TAG).wait().amax(0)
        by_split = dict(zip(race.seconds, slowest.tolist(), strict=True))
        best, left = leaders(by_split)
        race.seconds = {name: race.seconds[name] for name in left}
        race.checks += 1
        if len(left) > 1 and race.checks < len(CHECKS):
            return None

        self._best[size] = best
        tokens = size.rows * size.tokens
        means = {name: 1e3 * tokens * _trimmed_mean(each)[0] for name, each in by_split.items()}
        times = ", ".join(f"{name} {ms:.3g} ms" for name, ms in means.items())
        self.chosen(
            f"`split='auto'`: batches of {size.rows} x {size.tokens} tokens are split by"
            f" {best!r}. Forward, loss and backward took: {times}."
        )
        return best

    def _clock(self, device: torch.device) -> Callable[[], float]:
        def now() -> float:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return self.now()

        return now


class TimedRun:
    """A `ScheduleRun` that says how long it has taken, from its forward to behind its backward.

    Args:
        run: what is timed.
        now: the clock, in seconds.
        passed: told of the seconds behind backward; not told if there is none.
    """

    def __init__(
        self, run: ScheduleRun, now: Callable[[], float], passed: Callable[[float], None]
    ) -> None:
        self._run, self._now, self._passed = run, now, passed
        self._begun = 0.0

    def forward(self, hidden: Tensor, arguments: Sequence[Arguments]) -> Tensor:
        """See `ScheduleRun`."""
        self._begun = self._now()
        return self._run.forward(hidden, arguments)

    def backward(self, gradient: Tensor) -> Tensor:
        """See `ScheduleRun`."""
        gradient = self._run.backward(gradient)
        self._passed(self._now() - self._begun)
        return gradient


def leaders(passes: Mapping[str, Sequence[float]]) -> tuple[str, list[str]]:
    """Return the best split, and those that go on: it alone if the others are slower or as good.

    Splits are compared round by round, for what disturbs a machine lasts longer than a pass. All
    ranks compute the same to the last bit.

    Args:
        passes: seconds of each split's passes, round by round.
    """
    best = min(passes, key=lambda name: _trimmed_mean(passes[name])[0])
    left, close = [best], True
    for name, seconds in passes.items():
        if name == best:
            continue
        rounds = zip(seconds, passes[best], strict=True)
        behind, error = _trimmed_mean([2 * (own - its) / (own + its) for own, its in rounds])
        if behind <= SURE * error:
            left.append(name)
            close &= behind + SURE * error < CLOSE
    return best, [best] if close else left


def _trimmed_mean(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean without a fifth at each end, and its standard error (Tukey, McLaughlin)."""
    ordered, cut = sorted(values), len(values) // 5
    kept = ordered[cut : len(ordered) - cut]
    within = [min(max(value, kept[0]), kept[-1]) for value in ordered]
    share = len(kept) / len(ordered)
    return fmean(kept), stdev(within) / (share * len(ordered) ** 0.5)


def _apart(size: Size, other: Size) -> float:
    tokens, others = size.rows * size.tokens, other.rows * other.tokens
    return max(tokens, others) / min(tokens, others)
