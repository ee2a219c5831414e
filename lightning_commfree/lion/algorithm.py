"""Run the votes of a `DistributedLion` optimizer during one fit; save and restore its state."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.exchange import View
from lightning_commfree.comm.handshake import check_agreement
from lightning_commfree.comm.job import ReplicaChannels
from lightning_commfree.comm.requests import Requests
from lightning_commfree.lion.optimizer import DistributedLion
from lightning_commfree.lion.settings import LionSettings
from lightning_commfree.lion.voting import Voting
from lightning_commfree.lion.worker import mean_momenta
from lightning_commfree.model.replication import AveragedBuffers, digests_of_all, means_of


def agree_on_parameters(
    channel: Channel, module: nn.Module, param_groups: Sequence[Mapping[str, Any]]
) -> list[tuple[str, nn.Parameter]]:
    """Check that ranks optimize the same parameters; return (name, parameter) pairs; collective.

    The pairs are in module order. Raise a `ValueError` if some parameters are not in the module, or
    if names, groups or hyperparameters differ between ranks.
    """
    group_of = {p: i for i, group in enumerate(param_groups) for p in group["params"]}
    named = [(name, p) for name, p in module.named_parameters() if p in group_of]
    if len(named) < len(group_of):
        raise ValueError(
            f"{len(group_of) - len(named)} parameters of `DistributedLion` are not registered in"
            " the LightningModule, so ranks cannot match them by name. Register them, or remove"
            " them from the optimizer."
        )

    fingerprint = {f"parameter {name} in group": str(group_of[p]) for name, p in named}
    names = {p: name for name, p in named}
    for i, group in enumerate(param_groups):
        for key in ("lr", "betas", "weight_decay"):
            fingerprint[f"{key} of group {i}"] = repr(group[key])
        for j, p in enumerate(group["params"]):
            fingerprint[f"parameter {j} of group {i}"] = names[p]

    check_agreement(channel, fingerprint)
    return named


BUFFERS_TAG = "buffers"
# entries of a rank's own state (`resume.contents`) that a worker reuses when it resumes on
# another rank
_WORKER_STATE = ("algorithm", "optimizers", "precision", "tensors", "shared")
_DDP = repr("ddp")  # value of `inside` in a fingerprint if all ranks hold full momentum buffers


class LionVotes:
    """Runs the votes of a `DistributedLion` optimizer for one fit; collective over all ranks.

    If parameters, their order or their groups differ between ranks, a `ValueError` is raised.
    """

    name = "Distributed Lion"
    free_at_resume: frozenset[str] = frozenset()

    def __init__(
        self,
        module: nn.Module,
        lion: DistributedLion,
        settings: LionSettings,
        channels: ReplicaChannels,  # a replica is a worker here
        overlaps: bool,  # votes may start in backward; then nothing may change gradients after it
        requests: Requests | None = None,  # sent with every ballot
        sharded: bool = False,  # whether the ranks of this worker hold shards of the parameters
    ) -> None:
        self._sharded = sharded
        self._module, self.lion, self._settings = module, lion, settings
        self._channels, self._overlaps = channels, overlaps
        self._view = View.of(channels.between)
        self.buffers = AveragedBuffers(module)  # averaged over all ranks
        self._averaged = self._trainable_names()  # of the parameters that DDP averages in a node
        self._requests = requests or Requests()
        self.voting = self._join()

    # -- during a step

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Context manager around a step; starts votes during backward if they may overlap.

        If parameters were added to the optimizer, it joins the other workers again. With
        `node_size` above 1, parameters that became trainable during the fit raise a `RuntimeError`.
        """
        before = self.voting
        if not self.lion.is_voted_on:  # the user added parameters to the optimizer: join again
            self.voting = self._join()
            self.voting.load_state_dict(before.state_dict())
        if self._settings.node_size > 1:
            self._refuse_newly_trainable()
        with self.voting.during_backward() if self._overlaps else nullcontext():
            yield

    def after_step(self) -> None:
        """Do nothing: the votes have been exchanged within the step."""

    def figures(self) -> dict[str, float]:
        """Return the metrics of `Voting.figures`, with "lion/" before each name."""
        return {f"lion/{name}": figure for name, figure in self.voting.figures().items()}

    def cycle(self) -> tuple[Mapping[str, int], int]:
        """Return the calculated bytes a rank sends per cycle, by tag, and its length: 1 step."""
        return self.voting.bytes_per_step, 1

    # -- outside of steps

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Average the persistent floating-point buffers over all ranks, in place; collective."""
        world = self._channels.world

        def gather_flags(own: Sequence[int]) -> list[list[int]]:
            flags = torch.tensor(own, dtype=torch.uint8, device=world.device)
            found: list[list[int]] = world.all_gather(flags, BUFFERS_TAG).wait().tolist()
            return found

        text = self.buffers.agree_on_replaced(gather_flags)
        if text and world.rank == 0:
            warnings.warn(text, stacklevel=2)
        for buffer, mean in means_of(self.buffers.tensors(), world, BUFFERS_TAG):
            buffer.copy_(mean)

    def fingerprint(self) -> dict[str, str]:
        """Return the settings that must be equal on all workers, as strings by name.

        For an exact resume, they must also equal the settings in the checkpoint.
        """
        return self._settings.fingerprint()

    def averaged_buffers(self) -> AveragedBuffers:
        """Return the buffers that all ranks average, as an `AveragedBuffers`."""
        return self.buffers

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (shared voting state, this rank's buffers if ranks' differ); collective.

        The model weights in the checkpoint contain only the buffers' means over all ranks.
        """
        averaged = self.buffers.averaged
        buffers = dict(zip(averaged, self.buffers.tensors(averaged), strict=True))
        digests = digests_of_all(self._channels.world, list(buffers.values()), BUFFERS_TAG)
        own = {"buffers": buffers} if bool((digests != digests[0]).any()) else {}
        return {"voting": self.voting.state_dict(), "own_buffers": sorted(self.buffers.own)}, own

    def load_state_dict(self, shared: dict[str, Any], own: dict[str, Any] | None) -> None:
        """Restore what `state_dict` returned: the voting state and, in the module, own buffers."""
        self.buffers.keep_own(shared["own_buffers"])
        for name, values in (own or {}).get("buffers", {}).items():
            self._module.get_buffer(name).detach().copy_(values)
        self.voting.load_state_dict(shared["voting"])

    def overwrites(self, shared: object, own: dict[str, Any]) -> set[str]:
        """Return the names of the module's tensors that `load_state_dict` would overwrite."""
        del shared
        return set(own.get("buffers", {}))

    def adopt(
        self,
        saved_fingerprint: Mapping[str, str],  # of the settings in the checkpoint
        num_ranks: int,  # that saved it
        load_states: Callable[[Iterable[int]], list[dict[str, Any]]],  # [] if any is missing
    ) -> tuple[dict[str, Any], str] | None:
        """Return (own state with saved momentum buffers, message to users), or None; collective.

        Called if an exact resume is impossible; None if no buffers can be reused. If there are more
        workers than before, the new ones start with the mean of all saved buffers.
        """
        saved, now = saved_fingerprint, self._settings.fingerprint()
        size, inside = int(saved["node_size"]), saved.get("inside", _DDP)
        sharded = self._sharded if inside == now["inside"] else inside != _DDP
        if sharded and any(saved[name] != now[name] for name in ("node_size", "inside")):
            return None  # these ranks hold different shards
        rank_in_worker = self._channels.within.rank if sharded else 0
        workers, view = num_ranks // size, self._view
        sources = [view.rank] if view.rank < workers else range(workers)

        # ranks are numbered worker by worker
        found = load_states(worker * size + rank_in_worker for worker in sources)
        if not found:
            return None
        own = {name: found[0][name] for name in _WORKER_STATE}
        if len(found) > 1:
            states = zip(*(state["optimizers"] for state in found), strict=True)
            own["optimizers"] = [mean_momenta(of_workers) for of_workers in states]
            own["algorithm"] = {}  # the checkpoint contains the means of the buffers

        message = "every worker continues with its own momentum"
        if view.size > workers:
            message += (
                f", and workers from index {workers} start with the mean of all workers' momentum"
            )
        return own, message

    def close(self) -> None:
        """Stop voting; the optimizer returns to plain Lion."""
        self.lion.leave()

    # -- inside

    def _join(self) -> Voting:
        """Compare parameters with all ranks, and let the optimizer vote on them; collective."""
        world, groups = self._channels.world, self.lion.param_groups
        named = agree_on_parameters(world, self._module, groups)
        within, sharded = self._channels.within, self._sharded
        node = within if not sharded and self._settings.node_size > 1 else None
        shard_peers = within if sharded else None
        voting = self.lion.join(named, self._view, self._settings, node, shard_peers)
        voting.requests = self._requests
        return voting

    def _trainable_names(self) -> set[str]:
        return {name for name, p in self._module.named_parameters() if p.requires_grad}

    def _refuse_newly_trainable(self) -> None:
        # DDP averages only the gradients of parameters that were trainable when it was set up
        if late := sorted(self._trainable_names() - self._averaged):
            raise RuntimeError(
                f"The parameters {late} became trainable during the fit. With"
                f" `node_size={self._settings.node_size}` their gradients are not averaged within a"
                " node. Make them trainable before `fit`, or use `node_size=1`."
            )


def only_lion(strategy_name: str, optimizers: Sequence[Optimizer]) -> DistributedLion:
    """Return the optimizer of a fit; raise a `TypeError` if it is not a `DistributedLion`."""
    (optimizer,) = optimizers  # Lightning allows several only in manual optimization
    if not isinstance(optimizer, DistributedLion):
        raise TypeError(
            f"`{strategy_name}` requires `DistributedLion`, but `configure_optimizers` returned"
            f" `{type(optimizer).__name__}`, which does not support voting. Use"
            " `lightning_commfree.DistributedLion(self.parameters(), lr=1e-4,"
            " weight_decay=1.0)`, with a learning rate 3 to 10 times smaller than for AdamW and"
            " a weight decay larger by the same factor, or use the `ddp` strategy."
        )
    return optimizer


def refuse_without_momenta(lion: DistributedLion, step: int) -> None:
    """Raise a `ValueError` if an optimizer has no momentum buffer after loading a checkpoint.

    At step 0, when the checkpoint was saved before the first step, there is none yet.
    """
    if step and not any("momentum" in own for own in lion.state.values()):
        raise ValueError(
            f"The checkpoint was saved after {step} steps, but its optimizer state has no momentum"
            " buffers, so it was saved by an optimizer other than `DistributedLion`. Resume with"
            " that optimizer, or load only the weights: call `load_from_checkpoint`, then `fit`"
            " without `ckpt_path`."
        )
