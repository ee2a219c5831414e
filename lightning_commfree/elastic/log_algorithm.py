"""Streaming DiLoCo with replicas that join, leave and die, on a job's log (`elastic.log`).

Flight F exchanges fragment F mod P. All replicas share one schedule, and `step` is a replica's
position in it. A replica that a flight's commit lists lands as in `diloco.streaming`. Any other
replica takes the same outer step, and adds the change of the global copy to its local weights: its
outer gradient stays as it was, and counts in the fragment's next flight. The rest follows from
that:

- A replica that was stopped or cut off lands what it has missed, without training in between.
- A new replica begins with a state in the log, and does the same.
- If what it needs has been deleted, it continues from the newest state, and keeps its outer
  gradients.

In the mean, a replica's values are weighted by the inner steps that they contain, so the first
message of a new replica, which contains only zeros, has weight 0.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.requests import Requests
from lightning_commfree.diloco.fragments import Fragment
from lightning_commfree.diloco.outer import NONE_FROZEN, Frozen
from lightning_commfree.diloco.settings import DiLoCoSettings
from lightning_commfree.diloco.streaming import StreamingDiLoCo
from lightning_commfree.elastic.log import MissedError
from lightning_commfree.elastic.log_transport import NOT_LISTED, LogTransport


class LogDiLoCo(StreamingDiLoCo):
    """Streaming DiLoCo on one replica of an elastic job.

    Attributes:
        inner_steps: inner steps that it has taken; `step` is its position in the schedule.
        skipped: steps of the schedule that were skipped after the latest inner step.
        last_step: the step after which the fit ends; no steps are skipped beyond it.
        weight_per_step: weight of one inner step in a mean, such as its number of samples.
        state_every: flights between two states in the log, a multiple of the number of fragments.
        note: called with what happens, for a log of this replica's own.
    """

    transport: LogTransport

    def __init__(
        self,
        module: nn.Module,
        fragments: Sequence[Fragment],
        settings: DiLoCoSettings,
        transport: LogTransport,
        within: Channel | None = None,
        requests: Requests | None = None,
        state_cycles: int = 4,
        note: Callable[..., None] = lambda *_: None,
    ) -> None:
        self.inner_steps = self.skipped = 0
        self.weight_per_step, self.last_step = 1, math.inf
        self.state_every, self.note = state_cycles * len(fragments), note
        self._log = transport.log
        self._trained_since = [0] * len(fragments)  # `inner_steps` at the landing that counted last
        self._before: dict[int, Tensor] = {}  # global copies before an outer step
        self._residuals: dict[int, Tensor] = {}  # before the launch, by fragment
        super().__init__(module, fragments, settings, transport, within, requests)

    # -- a fit

    @torch.no_grad()
    def begin(self, fingerprint: Mapping[str, str], max_replicas: int) -> int | None:
        """Create the job or join it, with the newest state; return this replica's slot.

        None: all slots are taken now. Errors are those of `JobLog.begin`.
        """
        self._log.begin(fingerprint, self._state)
        member = self._log.enroll(max_replicas)
        if member is None:
            return None
        self._continue_from(*self._log.newest_state(), keep=False)
        self._log.start(self._log.launched)
        return member.slot

    @override
    @contextmanager
    def stepping(self) -> Iterator[None]:
        if names := self._frozen.unfrozen():
            raise RuntimeError(
                f"The parameters {sorted(names)} became trainable during the fit. Elastic replicas"
                " do not support this, because a replica that joins later would not know about the"
                " change. Make them trainable before `fit`, or use `StreamingDiLoCoStrategy`."
            )
        with super().stepping():
            yield

    @override
    def after_step(self) -> None:
        self.inner_steps, self.skipped = self.inner_steps + 1, 0
        self._advance()
        while self.step < self.last_step and self._log.is_behind(self.transport.follows):
            self._advance()
            self.skipped += 1
        self.note("at", self.inner_steps, self.step)

    def _advance(self) -> None:
        try:
            super().after_step()
        except MissedError:
            self._continue_from(*self._log.newest_state(), keep=True)

    @override
    def launch(self, p: int) -> None:
        if (residual := self.fragments[p].residual) is not None:
            self._residuals[p] = residual.clone()
        super().launch(p)
        transport = self.transport
        self.note("launch", transport.flights[p], p, self.step, not transport.follows)

    @override
    def outer_step(self, p: int, mean: Tensor, frozen: Frozen = NONE_FROZEN) -> None:
        if self.view.rank == NOT_LISTED:
            self._before[p] = self.fragments[p].global_copy.clone()
        super().outer_step(p, mean, frozen)

    @override
    def merge(self, p: int, abstained: bool, frozen: Frozen = NONE_FROZEN) -> None:
        fragment, listed = self.fragments[p], self.view.rank != NOT_LISTED
        before = self._before.pop(p, None)
        if not listed and bool(fragment.local_values().isfinite().all()):
            assert before is not None
            fragment.keep_outer_gradient(before, frozen)
            if fragment.residual is not None and p in self._residuals:
                fragment.residual.copy_(self._residuals[p])
        else:
            super().merge(p, abstained=not listed, frozen=frozen)
            self._trained_since[p] = self.inner_steps
        flight = self.transport.flights[p]
        self.note("land", flight, listed, int(fragment.digest()))
        if self.view.rank == 0 and (flight + 1) % self.state_every == 0:
            self._write_state(flight)

    @override
    def weight(self, p: int) -> int:
        return (self.inner_steps - self._trained_since[p]) * self.weight_per_step

    @property
    @override
    def is_alone(self) -> bool:
        return False  # another replica may follow, and gets only what was sent

    @override
    def finish(self) -> None:
        # the last round begins with fragment 0: skip to its next flight, as all replicas do
        total = len(self.fragments)
        self._log.launched = -(-self._log.launched // total) * total
        super().finish()
        for p, flight in self.transport.flights.items():
            self.note("final", flight, p, int(self.fragments[p].digest()))
        self._trained_since = [self.inner_steps] * total
        self._log.later(lambda: self._log.store.create("end", str(self._log.launched).encode()))

    @override
    def average_moved(self) -> None:
        """Do nothing: frozen parameters are not exchanged."""

    # -- states

    def _state(self) -> bytes:
        file = io.BytesIO()
        torch.save([fragment.state_dict() for fragment in self.fragments], file)
        return file.getvalue()

    def _write_state(self, flight: int) -> None:
        state, log = self._state(), self._log
        log.later(lambda: log.store.create(f"state/{flight}", state))
        log.later(lambda: log.store.overwrite("head", str(flight).encode()))
        log.later(lambda: log.delete_before(flight - self.state_every, self.state_every))

    def _continue_from(self, flight: int, state: bytes, keep: bool) -> None:
        """Continue as if `flight` had just landed; `keep`: with this replica's outer gradients."""
        self.note("state", flight, self.inner_steps)
        before = [fragment.global_copy.clone() for fragment in self.fragments]
        saved: list[Any] = torch.load(io.BytesIO(state), weights_only=True)
        for p, (fragment, one) in enumerate(zip(self.fragments, saved, strict=True)):
            fragment.load_state_dict(one)
            if keep:
                fragment.keep_outer_gradient(before[p])
            else:
                fragment.merge(mix=0.0)
        self.step = self._landing_step(flight) if flight >= 0 else 0
        total = len(self.fragments)
        launched = sum(self.schedule.launches_until(q, self.step) for q in range(total))
        self.flights.clear()
        self._log.forget_flights()
        self._log.launched, self.landed = flight + 1, flight + 1
        for other in range(flight + 1, launched):  # in flight at that step
            self.flights[other % total] = self.transport.follow(other % total)

    def _landing_step(self, flight: int) -> int:
        cycle, p = divmod(flight, len(self.fragments))
        launched_at = (cycle + 1) * self.schedule.sync_every + self.schedule.offset(p)
        return launched_at + self.schedule.overlap_steps
