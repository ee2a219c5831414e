"""A replica's fragments on their way: what leaves, what is in flight, what has arrived.

`streaming` says when, and what becomes of it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from lightning_commfree.comm.background import Background
from lightning_commfree.comm.channel import Channel
from lightning_commfree.diloco.evaluation import LocalMean
from lightning_commfree.diloco.fragment_exchange import (
    TAG,
    Arrival,
    FragmentExchange,
    cheaper_fragment_exchanges,
)
from lightning_commfree.diloco.fragments import Fragment
from lightning_commfree.diloco.landing import FragmentInFlight, Landing, receive, refuse_landing
from lightning_commfree.diloco.late_parameters import LateParameters, refuse_late
from lightning_commfree.diloco.message import Header
from lightning_commfree.diloco.nonfinite import is_nonfinite
from lightning_commfree.diloco.outer import OuterFragment
from lightning_commfree.diloco.schedule import Schedule
from lightning_commfree.diloco.settings import DiLoCoSettings
from lightning_commfree.diloco.wire import WIRE_FORMATS, warm_up


class FragmentTransfers(ABC):
    """Base of `StreamingDiLoCo`, with its arguments.

    Attributes:
        step: inner steps done.
        fragments: one `OuterFragment` per fragment; what joins comes behind the others.
        schedule: when they launch and land.
        landings: the latest `Landing` by fragment.
        means: how the mean of the local copies is formed, by fragment.
        settings: the knobs.
    """

    def __init__(
        self,
        module: nn.Module,
        fragments: Sequence[Fragment],
        settings: DiLoCoSettings,
        channel: Channel,
        replica: Channel | None = None,
    ) -> None:
        self.fragments = [
            OuterFragment(module, f, settings.outer_optimizer, replica, settings.outer_device)
            for f in fragments
        ]
        self._replica = replica
        overlap_steps = 0 if settings.eager else int(settings.overlap_steps)
        self.schedule = Schedule(settings.sync_every, len(fragments), overlap_steps)
        self.step = 0
        self._module = module
        self._late_parameters = LateParameters(module, fragments)
        self.landings: dict[int, Landing] = {}
        self._channel = channel
        self._wire = WIRE_FORMATS[settings.wire_dtype]
        devices = {fragment.global_copy.device for fragment in self.fragments}
        devices |= {parameter.device for parameter in module.parameters()}
        for device in {*devices, channel.device}:  # a thread averages shards on the channel's
            warm_up(self._wire, device)
        self.settings = settings
        self._background = Background(channel.ledger)
        self.means: list[LocalMean] = []
        self._open_exchanges()
        self._in_flight: dict[int, FragmentInFlight] = {}  # by fragment, in the order of launch

    def close(self) -> None:
        """End the thread of the exchanges; what is in flight is given up."""
        self._background.close()

    def fingerprint(self) -> dict[str, str]:
        """Return what all replicas must share: settings, fragments, kind of outer optimizer."""
        optimizer, scheduler = self.fragments[0].optimizer, self.fragments[0].scheduler
        plain = (int, float, str, tuple, type(None))  # others show an address when printed
        defaults = {k: v for k, v in optimizer.defaults.items() if isinstance(v, plain)}
        scheduled = "" if scheduler is None else f" with {type(scheduler).__name__}"
        at_begin = self.fragments[: self.schedule.num_fragments]
        return {
            **self.settings.fingerprint(),
            "fragments": repr([list(one.fragment.parameters) for one in at_begin]),
            "outer_optimizer": f"{type(optimizer).__name__} {defaults}{scheduled}",
        }

    def cycle(self) -> tuple[dict[str, int], int]:
        """Return the bytes that this rank sends in a cycle, by tag, and the steps of a cycle."""
        return {TAG: self.bytes_per_cycle}, self.settings.sync_every

    def figures(self) -> dict[str, float]:
        """Return per fragment what its latest landing says; the same until the next one."""
        return {
            f"outer/{name}_{p}": figure
            for p, landing in self.landings.items()
            for name, figure in landing.figures().items()
        }

    def unready(self, what: str) -> str | None:
        """Return what to say of outer weights that nothing has moved yet; None if all have moved.

        Args:
            what: uses them.
        """
        count = sum(not fragment.landings for fragment in self.fragments)
        if not count or self.settings.evaluate == "mean":
            return None
        return (
            f"This {what} uses the outer weights, and after {self.step} inner steps those of"
            f" {count} of {len(self.fragments)} fragments are still those with which the fit began."
            f" With `sync_every={self.settings.sync_every}` and"
            f" `overlap_steps={self.settings.overlap_steps}` every fragment has landed once after"
            f" step {self.schedule.complete_after}. `evaluate='mean'` takes the mean of the"
            " replicas' local weights."
        )

    def wait_in_flight(self) -> None:
        """Take what is in flight off the wire; it still lands at its step."""
        for flight in self._in_flight.values():
            flight.pending.wait()

    @property
    def num_replicas(self) -> int:
        """M, this one included."""
        return self._channel.size

    @property
    def in_flight(self) -> list[int]:
        """The fragments that have been launched and not landed, in the order of launch."""
        return list(self._in_flight)

    @property
    def bytes_per_cycle(self) -> int:
        """Bytes that this replica sends in `sync_every` steps, in which every fragment leaves."""
        return sum(exchange.num_bytes for exchange in self._exchanges)

    def _make_means(self, sizes: list[tuple[int, int]]) -> list[LocalMean]:
        """Return `means`; `sizes` as `cheaper_fragment_exchanges` takes them."""
        assert len(sizes) == len(self.fragments), "one for each"
        ways = zip(self.fragments, self._exchanges, strict=True)
        return [LocalMean(fragment, exchange, as_difference=True) for fragment, exchange in ways]

    def _send(self, p: int, exchange: FragmentExchange, values: Tensor, header: Header) -> Tensor:
        """Launch the values; return whether they hold NaN or Inf: bool, no dimension."""
        assert p not in self._in_flight, f"fragment {p} is launched while it is in flight"
        nonfinite = is_nonfinite(self.fragments[p], values, self._replica)
        rest = self._late_parameters.word(values=p == 0 and self._channel.size > 1)
        pending = exchange.launch(values, header._replace(nonfinite=nonfinite, rest=rest))
        self._in_flight[p] = FragmentInFlight(exchange, pending, time.perf_counter(), self.step)
        return nonfinite

    def _receive(self, p: int) -> Arrival:
        flight, fragment = self._in_flight.pop(p), self.fragments[p]
        before_s = self._channel.ledger.seconds_waited
        flight.pending.wait()
        waited_s = self._channel.ledger.seconds_waited - before_s
        arrival = receive(flight, fragment.global_copy.device, self._replica)
        names = fragment.fragment.parameters
        refuse_landing(arrival, p, names, self.step, self._channel, self.settings)
        self._note(flight, arrival)
        lr = float(fragment.optimizer.param_groups[0]["lr"])
        self.landings[p] = Landing.of(arrival, flight, lr, waited_s, self.landings.get(p))
        if arrival.rest_differs:
            self._average_moved()
        return arrival

    @abstractmethod
    def _note(self, flight: FragmentInFlight, arrival: Arrival) -> None:
        """Learn from what lands which replicas have ended."""

    @abstractmethod
    def _average_moved(self) -> None:
        """Find out what stands in no fragment and differs between the replicas; let it join."""

    def _join(self, fragment: Fragment, offset: int) -> int:
        """Let parameters that stood in no fragment be a new one; return its number."""
        kind, device = self.settings.outer_optimizer, self.settings.outer_device
        joined = OuterFragment(self._module, fragment, kind, self._replica, device)
        self.fragments.append(joined)
        self.schedule = replace(self.schedule, joined=(*self.schedule.joined, offset))
        p = len(self.fragments) - 1
        self._late_parameters.join(p, fragment, offset)
        self._open_exchanges()
        return p

    def _open_exchanges(self) -> None:
        sizes = [(f.parameter_numel, f.shard_numel - f.parameter_numel) for f in self.fragments]
        self._exchanges = cheaper_fragment_exchanges(
            self._channel, self._background, self._wire, sizes
        )
        self.means[:] = self._make_means(sizes)

    def _digest(self, p: int) -> Tensor | int:
        """Return what travels with this launch: the global copy's hash where it is due, else 0."""
        every = self.settings.check_drift_every
        cycle = (self.step - self.schedule.offset(p)) // self.settings.sync_every
        if not every or cycle % every:
            return 0
        return self.fragments[p].digest()

    def _refuse_late(self) -> None:
        held = (fragment.fragment for fragment in self.fragments)
        refuse_late(self._module, held, self.settings.replica_size)
