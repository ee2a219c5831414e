"""One replica: its fragments, what it says of itself, and its state.

`streaming` trains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.weight_swap import WeightSwap
from lightning_commfree.diloco.evaluation import Evaluation, LocalMean
from lightning_commfree.diloco.forecast import unready_weights
from lightning_commfree.diloco.fragment_exchange import TAG
from lightning_commfree.diloco.fragments import Fragment
from lightning_commfree.diloco.late_parameters import LateParameters
from lightning_commfree.diloco.nonfinite import refuse_to_save, restart_from_global
from lightning_commfree.diloco.outer import OuterFragment
from lightning_commfree.diloco.schedule import Schedule
from lightning_commfree.diloco.settings import DiLoCoSettings
from lightning_commfree.diloco.transfers import FragmentInFlight, Landing, Transfers


class Replica:
    """Base of `StreamingDiLoCo`, with its arguments and attributes."""

    name, replicas = "Streaming DiLoCo", True
    # two of them look and change nothing; the third may be what a run that has stopped goes on with
    free_at_resume = frozenset({"check_drift_every", "nonfinite", "evaluate"})

    def __init__(
        self,
        module: nn.Module,
        fragments: Sequence[Fragment],
        settings: DiLoCoSettings,
        channel: Channel,
        replica: Channel | None = None,
    ) -> None:
        self.settings, self.step = settings, 0
        self.fragments = [
            OuterFragment(module, f, settings.outer_optimizer, replica, settings.outer_device)
            for f in fragments
        ]
        overlap_steps = 0 if settings.eager else int(settings.overlap_steps)
        self.schedule = Schedule(settings.sync_every, len(fragments), overlap_steps)
        self.optimizers: Sequence[Optimizer] = ()

        self._module, self._channel, self._replica = module, channel, replica
        self._late_parameters = LateParameters(module, fragments)
        self._transfers = Transfers(self.fragments, settings, channel, replica)
        self.means: list[LocalMean] = self._make_means()
        self.weight_swap = WeightSwap(self.fragments)
        self.evaluation = Evaluation(self.means, settings, channel, replica)

    @torch.no_grad()
    def follow_hooks(self) -> None:
        """After `finish`, let what hooks make of frozen weights count; it is alike everywhere.

        A teacher follows its student when the last optimizer step is done.
        """
        for fragment in self.fragments:
            if not (fragment.fragment.parameters or self.weight_swap.is_in):
                fragment.take_local()

    def adopt(self, saved: object) -> None:
        """Use nothing of a save by other ranks; the checkpoint itself holds its outer weights."""
        del saved

    def close(self) -> None:
        """End the thread of the exchanges; what is in flight is given up."""
        self._transfers.background.close()

    # -- what it says of itself

    @property
    def num_replicas(self) -> int:
        """M, this one included."""
        return self._channel.size

    @property
    def in_flight(self) -> list[int]:
        """The fragments that have been launched and not landed, in the order of launch."""
        return list(self.flights)

    @property
    def flights(self) -> dict[int, FragmentInFlight]:
        """What is in flight, by fragment."""
        return self._transfers.flights

    @property
    def landings(self) -> dict[int, Landing]:
        """The latest `Landing` by fragment."""
        return self._transfers.landings

    @property
    def bytes_per_cycle(self) -> int:
        """Bytes that this replica sends in `sync_every` steps, in which every fragment leaves."""
        return sum(exchange.num_bytes for exchange in self._transfers.exchanges)

    def cycle(self) -> tuple[dict[str, int], int]:
        """Return the bytes that this rank sends in a cycle, by tag, and the steps of a cycle."""
        return {TAG: self.bytes_per_cycle}, self.settings.sync_every

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
        return unready_weights(what, self.settings, self.schedule, self.step, count)

    def shown(self) -> Sequence[Tensor] | None:
        """Return what a validation sees in place of the outer weights; collective.

        The mean of the local copies with `evaluate="mean"`, as `WeightSwap.put_in` takes it.
        """
        return self.evaluation.weights(self.step) if self.settings.evaluate == "mean" else None

    # -- saves

    def wait_in_flight(self) -> None:
        """Take what is in flight off the wire; it still lands at its step."""
        self._transfers.wait()

    @torch.no_grad()
    def refuse_to_save(self, world: Channel) -> None:
        """See that a checkpoint would hold finite weights; see `nonfinite.refuse_to_save`."""
        self.wait_in_flight()
        rule = self.settings.nonfinite
        refuse_to_save(self.fragments, self.weight_swap.local, rule, self.step, world)

    def state_dict(self) -> dict[str, Any]:
        """Return all that this replica needs to go on bit for bit, with nothing on the wire.

        What is in flight is waited for and stands in the state with its fragment; it lands at its
        step. The tensors are those that the replica goes on with: write them before its next step,
        or copy them.
        """
        later = self.fragments[self.schedule.num_fragments :]
        return {
            "step": self.step,
            "joined": [
                [list(one.fragment.parameters), list(one.fragment.buffers), offset]
                for one, offset in zip(later, self.schedule.joined, strict=True)
            ],
            "local": self.weight_swap.local,
            "fragments": [fragment.state_dict() for fragment in self.fragments],
            "in_flight": self._transfers.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken: same fragments, same settings, same replicas."""
        assert not self.weight_swap.is_in, "a state is loaded into the local copy"
        self.step = state["step"]

        # in earlier versions nothing joined
        for parameters, buffers, offset in state.get("joined", ()):
            self._join(Fragment(tuple(parameters), tuple(buffers)), offset)
            for name in parameters:
                self._module.get_parameter(name).requires_grad_(True)

        for fragment, fragment_state in zip(self.fragments, state["fragments"], strict=True):
            fragment.load_state_dict(fragment_state)
        self.weight_swap.load_local(state["local"])
        launched = {p: self.schedule.latest_launch(p, self.step) for p in state["in_flight"]}
        self._transfers.load_state_dict(state["in_flight"], launched)

    # -- inside

    def _make_means(self) -> list[LocalMean]:
        """Return how the mean of the local copies is formed, for each fragment."""
        ways = zip(self.fragments, self._transfers.exchanges, strict=True)
        return [LocalMean(fragment, exchange, as_difference=True) for fragment, exchange in ways]

    def _join(self, fragment: Fragment, offset: int) -> int:
        """Let parameters that stood in no fragment be a new one; return its number."""
        kind, device = self.settings.outer_optimizer, self.settings.outer_device

        joined = OuterFragment(self._module, fragment, kind, self._replica, device)
        self.fragments.append(joined)
        self.schedule = replace(self.schedule, joined=(*self.schedule.joined, offset))

        p = len(self.fragments) - 1
        self._late_parameters.join(p, fragment, offset)
        self._transfers.open()
        self.means[:] = self._make_means()
        return p

    def _restart_from_global(self, p: int, taken: Sequence[int]) -> None:
        names = [name for q in taken for name in self.fragments[q].fragment.parameters]
        parameters = map(self._module.get_parameter, names)
        restart_from_global(self.optimizers, parameters, p, self.step, taken)
