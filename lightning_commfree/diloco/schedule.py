"""Schedule for launching and landing fragments (arXiv:2501.18512, Algorithm 2).

All values are integers, and inner steps are counted from 1. With H = `sync_every`, P =
`num_fragments` and tau = `overlap_steps`, fragment p = 0 ... P - 1 has the offset
t_p = floor(p H / P). It launches after inner step t if t >= H + t_p and (t - t_p) mod H = 0, and
lands after inner step t + tau. So every fragment trains for a full cycle before its first launch.
For H = 4, P = 2, tau = 1:

========  ==============  ==============
fragment  launches        lands
========  ==============  ==============
0         4, 8, 12 ...    5, 9, 13 ...
1         6, 10, 14 ...   7, 11, 15 ...
========  ==============  ==============

With `sync_every="auto"`, H and tau change during the fit. A change begins right after a launch of
fragment 0. From there on, or, if tau falls, as many steps later as it falls by, the rule above
holds as if the fit had begun at that step, except that only fragments that have just been launched
wait for a full cycle again. So fragments are always launched in the order 0, 1 ... P - 1, 0 ...,
and land in that order, which the numbers of an elastic job's exchanges rely on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Pace(NamedTuple):
    """H and tau, from one inner step on."""

    begins: int  # applies to launches after this step; 0, or a launch of fragment 0
    sync_every: int
    overlap_steps: int


@dataclass(frozen=True)
class Schedule:
    """Launch and landing steps of all fragments."""

    sync_every: int  # H >= 1
    num_fragments: int  # P >= 1; if P > H, several fragments launch after the same step
    overlap_steps: int  # 0 <= tau < H; if 0, a fragment lands immediately
    # offsets of the fragments P, P + 1, ... that were added during the fit, for parameters that the
    # user unfroze; each first launches H steps after its offset
    joined: tuple[int, ...] = ()
    before: Schedule | None = None  # the schedule of launches until step `begins`
    begins: int = 0
    just_launched: frozenset[int] = frozenset()  # fragments that `before` launches at `begins`

    @property
    def total(self) -> int:
        """Number of fragments, including those that were added during the fit."""
        return self.num_fragments + len(self.joined)

    @property
    def paces(self) -> list[Pace]:
        """All paces in order, each with H, tau and the step after which it applies."""
        earlier = [] if self.before is None else self.before.paces
        return [*earlier, Pace(self.begins, self.sync_every, self.overlap_steps)]

    def changed(self, pace: Pace) -> Schedule:
        """Return this schedule with another pace from a launch of fragment 0 on."""
        assert not self.joined, "fragments that joined have no offset in another cycle"
        begins, sync_every, overlap_steps = pace
        assert begins == self.next_launch_of(0, begins - 1), "a pace begins with a launch"
        launched = frozenset(self.launched_at(begins))
        return Schedule(sync_every, self.num_fragments, overlap_steps, (), self, begins, launched)

    def offset(self, fragment: int) -> int:
        """Return t_p, the offset of a fragment in the cycle, in inner steps."""
        if fragment >= self.num_fragments:
            return self.joined[fragment - self.num_fragments]
        return fragment * self.sync_every // self.num_fragments

    def launched_at(self, step: int) -> list[int]:
        """Return the fragments to launch after inner step `step`, in ascending order."""
        counts = ((p, self.launches_until(p, step - 1)) for p in range(self.total))
        return [p for p, before in counts if self.launches_until(p, step) > before]

    def landed_at(self, step: int) -> list[int]:
        """Return the fragments to land after inner step `step`, in ascending order."""
        launched = step - self.overlap_steps
        landed = self.launched_at(launched) if launched > self.begins or not self.before else []
        if self.before is None or step - self.before.overlap_steps > self.begins:
            return landed
        return sorted([*landed, *self.before.landed_at(step)])

    def launches_until(self, fragment: int, step: int) -> int:
        """Return the number of launches of a fragment up to and including `step`."""
        if self.before is None or fragment >= self.before.total:
            return self._launches(fragment, step)
        earlier = self.before.launches_until(fragment, min(step, self.begins))
        return earlier + self._launches(fragment, step)

    def is_first_at_pace(self, fragment: int, step: int) -> bool:
        """Return whether a fragment's latest launch up to `step` is its first at a new pace."""
        if self.before is None:
            return False
        if launches := self._launches(fragment, step):
            return launches == 1
        return self.before.is_first_at_pace(fragment, min(step, self.begins))

    @property
    def complete_after(self) -> int:
        """The first inner step after which every fragment has landed at least once."""
        firsts = [self.next_launch_of(p, 0) for p in range(self.total)]
        return max(launch + self._overlap(launch) for launch in firsts)

    def next_launch(self, step: int) -> int:
        """Return the first inner step after `step` at which any fragment launches."""
        return min(self.next_launch_of(p, step) for p in range(self.total))

    def next_landing(self, step: int) -> int:
        """Return the inner step at which the first launch after `step` lands."""
        launch = self.next_launch(step)
        return launch + self._overlap(launch)

    def next_launch_of(self, fragment: int, step: int) -> int:
        """Return the first inner step after `step` at which a fragment launches."""
        if self.before is not None and fragment < self.before.total and step < self.begins:
            launch = self.before.next_launch_of(fragment, step)
            if launch <= self.begins:
                return launch
        start, first = self._start(fragment)
        return start + (first + self._launches(fragment, step)) * self.sync_every

    def _start(self, fragment: int) -> tuple[int, int]:
        """Return a step s and a count k: this pace's launches are at s + k H, s + (k + 1) H, ..."""
        offset = self.offset(fragment)
        if fragment >= self.num_fragments:
            return offset, 1
        if self.before is None:  # all wait for a full cycle
            return offset, 1
        # what is in flight lands first; and what shares fragment 0's step is launched after it
        shared = self.num_fragments > self.sync_every
        later = max(self.before.overlap_steps - self.overlap_steps, int(shared))
        return self.begins + later + offset, int(fragment in self.just_launched)

    def _launches(self, fragment: int, step: int) -> int:
        """Return the number of launches of a fragment at this pace, up to and including `step`."""
        start, first = self._start(fragment)
        return max((step - start) // self.sync_every + 1 - first, 0)

    def _overlap(self, launch: int) -> int:
        """Return the number of steps from a launch to its landing."""
        if self.before is None or launch > self.begins:
            return self.overlap_steps
        return self.before._overlap(launch)
