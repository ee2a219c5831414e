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
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Launch and landing steps of all fragments."""

    sync_every: int  # H >= 1
    num_fragments: int  # P >= 1; if P > H, several fragments launch after the same step
    overlap_steps: int  # 0 <= tau < H; if 0, a fragment lands immediately
    # offsets of the fragments P, P + 1, ... that were added during the fit, for parameters that the
    # user unfroze; each first launches H steps after its offset
    joined: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """Number of fragments, including those that were added during the fit."""
        return self.num_fragments + len(self.joined)

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
        return self.launched_at(step - self.overlap_steps)

    def latest_launch(self, fragment: int, step: int) -> int:
        """Return the step of a fragment's latest launch up to and including `step`."""
        offset = self.offset(fragment)
        return offset + (step - offset) // self.sync_every * self.sync_every

    def launches_until(self, fragment: int, step: int) -> int:
        """Return the number of launches of a fragment up to and including `step`."""
        return max((step - self.offset(fragment)) // self.sync_every, 0)

    @property
    def complete_after(self) -> int:
        """The first inner step after which every fragment has landed at least once."""
        return self.sync_every + max(map(self.offset, range(self.total))) + self.overlap_steps

    def next_launch(self, step: int) -> int:
        """Return the first inner step after `step` at which any fragment launches."""
        firsts = (self.offset(p) + self.sync_every for p in range(self.total))
        nexts = (self.latest_launch(p, step) + self.sync_every for p in range(self.total))
        return min(map(max, firsts, nexts))
