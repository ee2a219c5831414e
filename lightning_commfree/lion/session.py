"""A `DistributedLion` that votes with other workers for the length of a fit.

All workers compare parameters, their order and their groups before they vote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.handshake import check_agreement
from lightning_commfree.comm.job import ReplicaChannels
from lightning_commfree.comm.view import View
from lightning_commfree.lion.optimizer import DistributedLion
from lightning_commfree.lion.settings import LionSettings
from lightning_commfree.lion.voting import Voting
from lightning_commfree.lion.worker import mean_momenta
from lightning_commfree.model.replication import averaged_buffers


def agree_on_parameters(
    channel: Channel, module: nn.Module, groups: Sequence[Mapping[str, Any]]
) -> list[tuple[str, nn.Parameter]]:
    """Return an optimizer's named parameters in module order; check that all ranks have the same.

    Args:
        channel: channel over all ranks; collective.
        module: the module that contains the parameters.
        groups: `param_groups` of the optimizer.

    Raises:
        ValueError: some parameters are not in the module, or names, groups or hyperparameters
            differ between ranks.
    """
    group_of = {p: i for i, group in enumerate(groups) for p in group["params"]}
    named = [(name, p) for name, p in module.named_parameters() if p in group_of]
    if len(named) < len(group_of):
        raise ValueError(
            f"{len(group_of) - len(named)} parameters of `DistributedLion` belong to no submodule"
            " of the LightningModule, so the ranks cannot compare them by name. Register them in"
            " the module, or remove them from the optimizer."
        )

    fingerprint = {f"parameter {name} in group": str(group_of[p]) for name, p in named}
    names = {p: name for name, p in named}
    for i, group in enumerate(groups):
        for key in ("lr", "betas", "weight_decay"):
            fingerprint[f"{key} of group {i}"] = repr(group[key])
        for j, p in enumerate(group["params"]):
            fingerprint[f"parameter {j} of group {i}"] = names[p]

    check_agreement(channel, fingerprint)
    return named


BUFFERS_TAG = "buffers"
# entries of a rank's own state that belong to the worker, even if it resumes on another rank
_WORKER_STATE = ("algorithm", "optimizers", "precision", "tensors", "shared")
_DDP = repr("ddp")  # `inside` setting with which every rank of a node has all momenta


class VotingSession:
    """Run the votes of a `DistributedLion`, also when its parameters change.

    Collective over all ranks.

    Args:
        module: the module that contains the parameters.
        optimizer: this rank's optimizer.
        settings: settings of the vote.
        channels: channels between all ranks, the workers, and the ranks of this worker.
        overlaps: whether votes may start during backward: nothing changes the gradients after it.

    Attributes:
        stream_ended: whether any worker's data stream ended with the last step; the same on all.
        voting: the current votes.

    Raises:
        ValueError: the ranks have different parameters, or in a different order or groups.
    """

    name, replicas = "Distributed Lion", True
    free_at_resume: frozenset[str] = frozenset()

    def __init__(
        self,
        module: nn.Module,
        optimizer: DistributedLion,
        settings: LionSettings,
        channels: ReplicaChannels,
        overlaps: bool,
    ) -> None:
        self._module, self._lion, self._settings = module, optimizer, settings
        self._channels, self._overlaps = channels, overlaps
        self._view = View.of(channels.between)
        self._averaged = self._trainable()  # names of parameters that DDP averages within a node
        self.stream_ended = False
        self.voting = self._join()

    # -- in a step

    def send_flags(self, stop: Callable[[], bool], stream_ends: Callable[[], bool]) -> None:
        """Send two flags with the votes of every step; see `stop` and `stream_ends` of `Voting`."""
        self.voting.stop, self.voting.stream_ends = stop, stream_ends

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Vote in the optimizer step of a `with` block.

        Raises:
            RuntimeError: parameters became trainable, and a node has several ranks.
        """
        if not self._lion.is_voted_on or self._lion.voting is not self.voting:
            before = self.voting  # the user has added parameters to the optimizer
            self.voting = self._join()
            self.voting.load_state_dict(before.state_dict())
            self.send_flags(before.stop, before.stream_ends)
        if self._settings.node_size > 1:
            self._check_thawed()
        with self.voting.during_backward() if self._overlaps else nullcontext():
            yield

    def after_step(self, stop: bool) -> bool:
        """Return whether any worker wanted to stop, by its flag in the step (`send_flags`)."""
        del stop
        stop_agreed, self.voting.stop_agreed = self.voting.stop_agreed, False
        self.stream_ended, self.voting.stream_ended = self.voting.stream_ended, False
        return stop_agreed

    def figures(self) -> dict[str, float]:
        """Return metrics of the votes by name, for logging; shares are those of the last step."""
        return {f"lion/{name}": figure for name, figure in self.voting.figures().items()}

    def cycle(self) -> tuple[Mapping[str, int], int]:
        """Return the bytes that this rank sends per cycle, by tag, and the steps of a cycle."""
        return self.voting.cycle()

    # -- outside of steps

    def follow_parameters(self) -> None:
        """Update master copies from parameters that were written to."""
        self._lion.follow_parameters()

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Average the persistent floating-point buffers over all ranks."""
        for buffer, mean in averaged_buffers(self._module, self._channels.world, BUFFERS_TAG):
            buffer.copy_(mean)

    def fingerprint(self) -> dict[str, str]:
        """Return the settings that must be equal on all workers and after a resume."""
        return self._settings.fingerprint()

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state of the votes, which is equal on all workers."""
        return self.voting.state_dict(), {}

    def load_state_dict(self, shared: dict[str, Any], own: dict[str, Any] | None) -> None:
        """Restore a state that `state_dict` returned."""
        del own
        self.voting.load_state_dict(shared)

    def adopt(
        self,
        was: Mapping[str, str],
        ranks: int,
        load: Callable[[Iterable[int]], list[dict[str, Any]]],
    ) -> tuple[dict[str, Any], str] | None:
        """Resume with another number of ranks: workers keep their momenta, new ones get the mean.

        Args:
            was: the settings of the save.
            ranks: the number of ranks that saved it.
            load: returns the saved states of some ranks.

        Returns:
            This rank's state and a sentence about it; None if no momenta can be used.
        """
        size, divided = int(was["node_size"]), was.get("inside", _DDP) != _DDP
        now = self._settings.fingerprint()
        if divided and any(was[name] != now[name] for name in ("node_size", "inside")):
            return None  # these ranks hold other shards
        place = self._channels.within.rank if divided else 0
        workers, view = ranks // size, self._view
        wanted = [view.rank] if view.rank < workers else range(workers)

        # ranks are numbered worker by worker
        found = load(worker * size + place for worker in wanted)
        if not found:
            return None
        own = {name: found[0][name] for name in _WORKER_STATE if name in found[0]}
        if len(found) > 1:
            own["optimizers"] = [mean_momenta([one["optimizers"][0] for one in found])]

        message = "every worker continues with its own momentum"
        if view.size > workers:
            message += f", workers from {workers} on with the mean of all"
        return own, message

    def close(self) -> None:
        """Stop voting: the optimizer is plain Lion again."""
        self._lion.leave()

    # -- inside

    def _join(self) -> Voting:
        named = agree_on_parameters(self._channels.world, self._module, self._lion.param_groups)
        within, divided = self._channels.within, self._settings.inside != "ddp"
        node, others = (None, within) if divided else (within, None)
        if self._settings.node_size == 1:
            node = None
        return self._lion.join(named, self._view, self._settings, node, others)

    def _trainable(self) -> set[str]:
        return {name for name, p in self._module.named_parameters() if p.requires_grad}

    def _check_thawed(self) -> None:
        """Check that DDP averages all trained parameters: it saw only those of the fit's start."""
        if late := sorted(self._trainable() - self._averaged):
            raise RuntimeError(
                f"The parameters {late} became trainable after the fit had begun, so with"
                f" `node_size={self._settings.node_size}` their gradients are not averaged within a"
                " node. Make them trainable before `fit`, or use `node_size=1`."
            )


def only_lion(strategy: str, optimizers: Sequence[Optimizer]) -> DistributedLion:
    """Return the only optimizer of a training.

    Args:
        strategy: its name, for the message.
        optimizers: of the training; one.

    Raises:
        TypeError: it is not a `DistributedLion`.
    """
    (optimizer,) = optimizers
    if not isinstance(optimizer, DistributedLion):
        raise TypeError(
            f"`{strategy}` needs `DistributedLion`, but `configure_optimizers` returned"
            f" `{type(optimizer).__name__}`: a vote has no meaning for another optimizer. Return"
            " `lightning_commfree.DistributedLion(self.parameters(), lr=1e-4, weight_decay=1.0)`,"
            " with a learning rate 3 to 10 times smaller and a weight decay as much larger than"
            " AdamW's, or use the strategy `ddp`."
        )
    return optimizer


def refuse_without_momenta(lion: DistributedLion, step: int) -> None:
    """Check that an optimizer state that was loaded from a checkpoint has momenta.

    Raises:
        ValueError: it has none, although it was saved after `step` > 0 steps.
    """
    if step and not any("momentum" in own for own in lion.state.values()):
        raise ValueError(
            f"The checkpoint was saved after {step} steps, but its optimizer state has no momentum:"
            " it is from another optimizer than `DistributedLion`. Resume with that optimizer, or"
            " load only the weights: `load_from_checkpoint`, then `fit` without `ckpt_path`."
        )
