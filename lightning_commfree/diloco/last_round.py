"""The end of a fit is common to all replicas, whichever replica's training ends first.

A replica whose data or will has ended after step s says so in what it sends next, and that is what
the schedule lets leave next: every other replica sends the same fragment then. What it holds no
longer changes, so it need not wait for the step at which that fragment is due.

All have ended after the same step: the usual case, and every header says so.
    The message was the first of the last round (`settle`), which goes on with the other fragments.
    Nothing was sent for the agreement.
Some go on:
    They learn of it where that fragment lands with them, and end after that step too. Until then
    they launch as ever, and so does the replica that has ended: same fragments, same order. Then
    all land what is in flight, and hold the last round over all fragments.

With eager updates a fragment lands a cycle later, and what it carries is no mean of local copies:
the last round begins anew, and the first message costs its bytes.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_commfree.diloco.fragment_exchange import Arrival
from lightning_commfree.diloco.landing import FragmentInFlight
from lightning_commfree.diloco.message import EndNotice
from lightning_commfree.diloco.transfers import FragmentTransfers


class LastRound(FragmentTransfers):
    """The part of `StreamingDiLoCo` that ends a fit.

    Attributes:
        step: inner steps done; where a replica ends earlier than others, at last theirs.
        parted: whether the replicas' trainings have ended after different steps, or some would have
            gone on; the same on all of them. From the landing on at which they learn of it.
    """

    _lands_first = False  # after a step, before what is due is launched

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parted = False
        self._ended: EndNotice | None = None
        self._common: int | None = None  # after which all do, once a mark has come

    @abstractmethod
    def _launch(self, p: int, stop: bool) -> Tensor:
        """Launch a fragment, with the mark."""

    @abstractmethod
    def _land_in_flight(self) -> list[bool]:
        """Land what is in flight; return for each whether a replica wants to stop."""

    @abstractmethod
    def _settle(self, p: int, stop: bool) -> bool:
        """Exchange a fragment, with the mark, and take the mean; return as `_land_in_flight`."""

    @abstractmethod
    def _settle_arrived(self, p: int) -> bool:
        """The same for a fragment that is in flight."""

    @property
    @abstractmethod
    def _lands_after(self) -> int:
        """Steps from launch to landing."""

    @override
    def _note(self, flight: FragmentInFlight, arrival: Arrival) -> None:
        if any(step >= 0 for step in arrival.ended) and min(arrival.ended) < 0:
            if self._common is None:
                self._common = flight.step + self._lands_after
            self.parted = True

    def _finish_rounds(self, stop: bool, goes_on: bool) -> list[bool]:
        settled: list[int] = []
        if self._channel.size > 1:
            self._ended = EndNotice(self.step, goes_on)
        stops = self._land_in_flight()
        if self._channel.size > 1:
            if self._common is None:
                stops += self._begin_last_round(stop, settled)
            if self._common is not None:
                stops += self._go_along(stop)
        for p, _ in enumerate(self.fragments):  # one may join meanwhile
            if p not in settled:
                stops.append(self._settle(p, stop))
        self._ended = self._common = None
        return stops

    def _begin_last_round(self, stop: bool, settled: list[int]) -> list[bool]:
        """Send the fragment that is due next; if all have ended it is among the `settled`."""
        self.step = self.schedule.next_launch(self.step)
        p = self.schedule.launched_at(self.step)[0]
        self._launch(p, stop)
        flight = self._in_flight[p]
        ended = flight.exchange.ended(flight.pending.wait())
        if min(ended) < 0:
            self._common = flight.step + self._lands_after
            return []
        self.parted = len(set(ended)) > 1
        marks = [EndNotice.decode(code) for code in ended]
        self.step = max(mark.step for mark in marks)  # before errors and messages tell it
        if self.means[p].as_difference:
            settled.append(p)
            stop = self._settle_arrived(p)
        else:
            stop = self._receive(p).stop
        return [stop]

    def _go_along(self, stop: bool) -> list[bool]:
        """Launch with the others until the step after which all end, and land."""
        assert self._common is not None, "a mark has come"
        begun = bool(self._in_flight)  # this step; more may be due there
        for step in range(self.step + (not begun), self._common + (not self._lands_first)):
            self.step = step
            for p in self.schedule.launched_at(step):
                if p not in self._in_flight:
                    self._launch(p, stop)
        self.step = self._common
        return self._land_in_flight()
