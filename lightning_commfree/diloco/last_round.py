"""The end of a fit is common to all replicas, whichever replica's training ends first.

A replica that wants to end after step s, or must, says so in what it sends next. The schedule says
what that is: every other replica sends the same fragment then. What it holds no longer changes, so
it need not wait for the step at which that fragment is due.

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
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lightning_commfree.diloco.evaluation import LocalMean
from lightning_commfree.diloco.message import EndNotice
from lightning_commfree.diloco.outer import OuterFragment
from lightning_commfree.diloco.schedule import Schedule
from lightning_commfree.diloco.transfers import FragmentInFlight


class Ending(Protocol):
    """What the last round asks of the algorithm.

    Attributes:
        step: inner steps done; where a replica ends earlier than others, at last theirs.
        parted: set where the replicas' trainings end after different steps.
        lands_first: what is due lands ahead of the launches of a step.
    """

    step: int
    schedule: Schedule
    means: list[LocalMean]
    parted: bool
    lands_first: bool

    @property
    def fragments(self) -> Sequence[OuterFragment]:
        """All, also what joins while the round runs."""
        ...

    @property
    def flights(self) -> dict[int, FragmentInFlight]:
        """What is in flight, by fragment."""
        ...

    @property
    def num_replicas(self) -> int:
        """M, this one included."""
        ...

    @property
    def lands_after(self) -> int:
        """Steps from launch to landing."""
        ...

    @abstractmethod
    def launch(self, p: int, stop: bool) -> Tensor:
        """Launch a fragment, with the notice."""

    @abstractmethod
    def land_in_flight(self) -> list[bool]:
        """Land what is in flight; return for each whether a replica wants to stop."""

    @abstractmethod
    def settle(self, p: int, stop: bool) -> bool:
        """Exchange a fragment, with the notice, and take the mean; return as `land_in_flight`."""

    @abstractmethod
    def settle_arrived(self, p: int) -> bool:
        """The same for a fragment that is in flight."""

    @abstractmethod
    def give_up(self, p: int) -> bool:
        """Receive a fragment that is in flight and use nothing of it; return as `settle`."""


class LastRound:
    """Agrees on the step after which all replicas end, and holds the round that ends a fit.

    Args:
        algorithm: what is ended.

    Attributes:
        notice: what this replica says of its end, while the round runs.
    """

    def __init__(self, algorithm: Ending) -> None:
        self._algorithm = algorithm
        self.notice: EndNotice | None = None
        self._common: int | None = None  # after which all do, once a notice has come

    def note(self, launched: int, ended: Sequence[int]) -> None:
        """Learn from what lands which replicas have ended.

        Args:
            launched: the step after which it was launched.
            ended: as `Arrival.ended`.
        """
        if max(ended) >= 0 and min(ended) < 0:
            if self._common is None:
                self._common = launched + self._algorithm.lands_after
            self._algorithm.parted = True

    def hold(self, stop: bool, goes_on: bool) -> list[bool]:
        """Land what is in flight, wait for the others, and settle all fragments.

        Args:
            stop: whether this replica wants the training to stop.
            goes_on: it would have trained on, without others that end.

        Returns:
            For each landing whether a replica wanted to stop.
        """
        algorithm, settled = self._algorithm, list[int]()
        if algorithm.num_replicas > 1:
            self.notice = EndNotice(algorithm.step, goes_on)

        stops = algorithm.land_in_flight()
        if algorithm.num_replicas > 1:
            if self._common is None:
                stops += self._begin(stop, settled)
            if self._common is not None:
                stops += self._go_along(self._common, stop)

        for p, _ in enumerate(algorithm.fragments):  # one may join meanwhile
            if p not in settled:
                stops.append(algorithm.settle(p, stop))
        self.notice = self._common = None
        return stops

    def _begin(self, stop: bool, settled: list[int]) -> list[bool]:
        """Send the fragment that is due next; if all have ended it is among the `settled`."""
        algorithm = self._algorithm
        algorithm.step = algorithm.schedule.next_launch(algorithm.step)
        p = algorithm.schedule.launched_at(algorithm.step)[0]
        algorithm.launch(p, stop)

        flight = algorithm.flights[p]
        ended = flight.exchange.ended(flight.pending.wait())
        if min(ended) < 0:
            self._common = flight.step + algorithm.lands_after
            return []

        algorithm.parted = len(set(ended)) > 1
        # before errors and messages tell it
        algorithm.step = max(EndNotice.decode(code).step for code in ended)
        if algorithm.means[p].as_difference:
            settled.append(p)
            stop = algorithm.settle_arrived(p)
        else:
            stop = algorithm.give_up(p)
        return [stop]

    def _go_along(self, common: int, stop: bool) -> list[bool]:
        """Launch with the others until the step `common`, after which all end; then land."""
        algorithm = self._algorithm
        begun = bool(algorithm.flights)  # this step; more may be due there
        for step in range(algorithm.step + (not begun), common + (not algorithm.lands_first)):
            algorithm.step = step
            for p in algorithm.schedule.launched_at(step):
                if p not in algorithm.flights:
                    algorithm.launch(p, stop)

        algorithm.step = common
        return algorithm.land_in_flight()
