"""The plain mean of the replicas' local copies: at the end of a fit, and for a validation.

With `evaluate="mean"` a validation sees it in place of the outer weights, which in a short run are
the initial ones, or up to H steps old. Nothing is trained on it: global copies, outer optimizers,
local copies and what is in flight stay as they are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_commfree.comm.channel import Channel
from lightning_commfree.diloco.fragment_exchange import FragmentExchange
from lightning_commfree.diloco.message import Header
from lightning_commfree.diloco.outer import OuterFragment
from lightning_commfree.diloco.refusals import refuse_landing
from lightning_commfree.diloco.settings import DiLoCoSettings
from lightning_commfree.diloco.transfers import FragmentInFlight, is_nonfinite

TAG = "evaluation"


@dataclass(frozen=True)
class LocalMean:
    """How the mean of the replicas' local copies of a fragment is formed.

    Args:
        fragment: as this replica holds it.
        exchange: its way to the other replicas.
        as_difference: to the global copy, which the replicas share; else the values themselves.
    """

    fragment: OuterFragment
    exchange: FragmentExchange
    as_difference: bool

    def values(self) -> Tensor:
        """Return what leaves: fp32, shape (S,), a new tensor."""
        if self.as_difference:
            return self.fragment.outer_gradient()
        return self.fragment.local_values()

    def of(self, mean: Tensor) -> Tensor:
        """Return the mean local copy, fp32, shape (S,), by the mean of what has left."""
        if not self.as_difference:
            return mean
        values, numel = mean.clone(), self.fragment.parameter_numel
        torch.sub(self.fragment.global_copy[:numel], values[:numel], out=values[:numel])
        return values

    def settle(self, mean: Tensor | None) -> None:
        """Make the replicas' mean both copies; the outer optimizer has no part in it.

        The global copy then is what the local one holds, in bf16 too: a second time moves nothing.

        Args:
            mean: of what has left, the same on all replicas. None: of one replica alone. Its local
                copy stays as it is.
        """
        fragment = self.fragment
        if mean is not None:
            fragment.global_copy.copy_(self.of(mean))
            fragment.merge(mix=0.0)
        fragment.take_local()

        if mean is None and fragment.replica.size > 1:  # its ranks have buffers of their own
            fragment.merge(mix=0.0)
        fragment.landings += 1


class Evaluation:
    """Exchanges the mean for validations and checkpoints, once per inner step at most.

    Args:
        means: of every fragment.
        settings: of the fit.
        channel: to the other replicas; one replica alone shows its local copy.
        replica: to the other ranks of the same replica.

    Attributes:
        latest: the mean, of every fragment. None where there is none yet; whoever changes the
            weights makes it None.
    """

    def __init__(
        self,
        means: Sequence[LocalMean],
        settings: DiLoCoSettings,
        channel: Channel,
        replica: Channel | None,
    ) -> None:
        self._means, self._settings = means, settings
        self._channel, self._replica = channel, replica
        self.latest: list[Tensor] | None = None

    @torch.no_grad()
    def weights(self, step: int) -> list[Tensor]:
        """Return the mean of every fragment, fp32, shape (S,).

        Collective over all ranks, whose modules hold their local copies now.

        Args:
            step: inner steps done.

        Raises:
            RuntimeError: a replica's values are not finite, or the replicas are at different steps.
        """
        if self.latest is None:
            if self._channel.size == 1:
                self.latest = [mean.fragment.local_values() for mean in self._means]
            else:
                flights = [self._launch(mean, step) for mean in self._means]
                self.latest = [self._receive(p, flight, step) for p, flight in enumerate(flights)]
        return self.latest

    def _launch(self, mean: LocalMean, step: int) -> FragmentInFlight:
        values = mean.values()
        nonfinite = is_nonfinite(mean.fragment, values, self._replica)
        pending = mean.exchange.launch(values, Header(False, step, 0, nonfinite), TAG)
        return FragmentInFlight(mean.exchange, pending, time.perf_counter(), step)

    def _receive(self, p: int, flight: FragmentInFlight, step: int) -> Tensor:
        mean = self._means[p]
        arrival = flight.receive(mean.fragment.global_copy.device, self._replica)
        names = mean.fragment.fragment.parameters
        refuse_landing(arrival, p, names, step, self._channel, self._settings)
        return mean.of(arrival.mean)
