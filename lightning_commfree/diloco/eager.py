"""Eager updates for overlapped communication and computation in DiLoCo (arXiv:2502.12996).

A whole cycle is hidden: what a fragment's launch has sent lands when the fragment is launched
again, H steps later. With M replicas, the mean D(t-H) that lands and this replica's own part d(t-H)
of it, the outer optimizer gets

    D(t-H) + (d(t) - d(t-H)) / M

so that one's own part is up to date and the others' one cycle late; before the first arrival, with
nothing of the others, d(t) / M. The outer gradients d are what was sent, as everybody decodes
them. Every replica therefore steps a global copy of its own, and drift is not looked for. With one
replica this is DiLoCo without delay.

A replica with NaN or Inf adds no part of its own, and where it abstains it takes its global copy at
once: when the others learn of it, a cycle later, it is whole again.

Averaged buffers are no gradients: their mean of one cycle ago becomes the global copy when it
arrives, and until the first one the local buffers stay as they are.

`finish` lands the others' part of what is in flight and takes the mean of the local weights, as
without eager updates. The weights themselves travel, in fp32: the global copies differ, so the
replicas have none in common to take differences from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function
from typing_extensions import override

from lightning_commfree.diloco.codec import WIRE_FORMATS, decode
from lightning_commfree.diloco.nonfinite import take_global
from lightning_commfree.diloco.streaming import LocalMean, StreamingDiLoCo


class EagerDiLoCo(StreamingDiLoCo):
    """`StreamingDiLoCo` with `overlap_steps="eager"`; same arguments and attributes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sent: dict[int, Tensor] = {}  # by fragment in flight: its own part, encoded

    @override
    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return nothing shared: the global copies are this replica's own."""
        shared, own = super().state_dict()
        return {}, {**own, "copies": shared, "sent": dict(self._sent)}

    @override
    def load_state_dict(self, shared: dict[str, Any], own: dict[str, Any] | None) -> None:
        assert own is not None, "no replica joins others whose global copies differ"
        super().load_state_dict(own["copies"], own)
        self._sent = dict(own["sent"])

    @override
    def _exchange(self, launches: list[int], stop: bool) -> list[bool]:
        stops = []
        for p in launches:
            arrives = p in self.flights
            late, stopped = self._take_late(p)
            stops.append(stopped)
            nonfinite = self.launch(p, stop)
            with record_function(f"land fragment #{p}"):
                late[: self.fragments[p].parameter_numel] += self._own(p) / self._channel.size
                self.fragments[p].outer_step(late)
                if self.settings.nonfinite == "abstain" and nonfinite:
                    self._restart_from_global(p, take_global(self.fragments, p, self._replica))
                else:
                    self.fragments[p].merge(self.settings.mix, buffers=arrives)
        return stops

    @override
    def _make_means(self) -> list[LocalMean]:
        ways = zip(self.fragments, self._transfers.ways(WIRE_FORMATS["fp32"]), strict=True)
        return [LocalMean(fragment, exchange, as_difference=False) for fragment, exchange in ways]

    @override
    def land_in_flight(self) -> list[bool]:
        stops = []
        for p in list(self.flights):
            late, stopped = self._take_late(p)
            self._land_late(p, late)
            stops.append(stopped)
        return stops

    @property
    @override
    def lands_after(self) -> int:
        return self.settings.sync_every

    def _land_late(self, p: int, late: Tensor) -> None:
        """Take the others' part alone, in a last landing."""
        self.fragments[p].outer_step(late)
        self.fragments[p].merge(self.settings.mix, buffers=False)  # a cycle old

    def _take_late(self, p: int) -> tuple[Tensor, bool]:
        """Return the others' part of the mean that lands now, and whether somebody wants to stop.

        Zeros before the first arrival. The buffers that arrive go into the global copy.
        """
        fragment = self.fragments[p]
        if p not in self.flights:
            return torch.zeros_like(fragment.global_copy), False

        with record_function(f"land fragment #{p}"):
            own = self._own(p)
            arrival = self._receive(p)
            fragment.average_buffers(arrival.mean)

            late = arrival.mean.clone()
            counted = self._channel.size - len(arrival.nonfinite)
            late[: fragment.parameter_numel] -= own / counted
            return late, arrival.stop

    @override
    def launch(self, p: int, stop: bool) -> Tensor:
        nonfinite = super().launch(p, stop)
        gradient = self.fragments[p].outer_gradient()[: self.fragments[p].parameter_numel]
        gradient.masked_fill_(nonfinite, 0.0)  # it counts for nothing here either

        size = self._transfers.wire.num_bytes(gradient.numel())
        sent = torch.empty(size, dtype=torch.uint8, device=gradient.device)
        self._transfers.wire.encode(gradient, out=sent)
        self._sent[p] = sent
        return nonfinite

    def _own(self, p: int) -> Tensor:
        fragment = self.fragments[p]
        sent = self._sent[p].to(fragment.global_copy.device)
        own = torch.empty(fragment.parameter_numel, dtype=torch.float32, device=sent.device)
        return decode(self._transfers.wire, sent, own)

    @override
    def _digest(self, p: int) -> int:
        return 0
