"""One worker's optimizer among the others', for the length of a training.

What all workers must agree on before they vote: the parameters, their order, their groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.handshake import check_agreement
from lightning_commfree.comm.job import ReplicaChannels
from lightning_commfree.lion.optimizer import DistributedLion
from lightning_commfree.lion.settings import LionSettings
from lightning_commfree.lion.voting import Voting
from lightning_commfree.lion.worker import mean_momenta
from lightning_commfree.model.replication import averaged_buffers


def agree_on_parameters(
    channel: Channel, module: nn.Module, groups: Sequence[Mapping[str, Any]]
) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of an optimizer with their names, in the order of the module.

    Args:
        channel: over all ranks; collective.
        module: that holds the parameters.
        groups: `param_groups` of the optimizer.

    Raises:
        ValueError: the module does not hold all of them, or names, groups or hyperparameters are
            not the same on all ranks.
    """
    group_of = {p: i for i, group in enumerate(groups) for p in group["params"]}
    named = [(name, p) for name, p in module.named_parameters() if p in group_of]
    if len(named) < len(group_of):
        raise ValueError(
            f"{len(group_of) - len(named)} parameters of `DistributedLion` belong to no"
            " submodule of the LightningModule, so the ranks could not agree on them. Register"
            " them, or leave them out of the optimizer."
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
# entries of a rank's own state that belong to a worker, wherever it trains
_OF_WORKER = ("algorithm", "optimizers", "precision", "tensors", "shared")
_WHOLE = repr("ddp")  # `inside` where every rank of a node has all of the momenta


class JoinedLion:
    """A `DistributedLion` that votes with the other workers, and joins them again where it must.

    Collective over all ranks.

    Args:
        module: has the parameters.
        optimizer: of this rank.
        settings: of the vote.
        channels: to all ranks, to the other workers, to the ranks that form one worker with this.
        overlaps: votes may start during backward, for nothing changes the gradients after it.

    Attributes:
        stream_ended: some worker's stream has ended with the last step; the same on all of them.
        voting: the votes as of now.

    Raises:
        ValueError: the ranks have not the same parameters in the same order and groups.
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
        self._averaged = self._trainable()  # what is averaged within a node, by name
        self.stream_ended = False
        self.voting = self._join()

    # -- in a step

    def send_flags(self, stop: Callable[[], bool], stream_ends: Callable[[], bool]) -> None:
        """Send two flags with the votes of every step; see `Voting.stop` and `stream_ends`."""
        self.voting.stop, self.voting.stream_ends = stop, stream_ends

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Vote in the optimizer's step in the body.

        Raises:
            RuntimeError: parameters of a node of several ranks have become trainable.
        """
        if not self._lion.is_voted_on or self._lion.voting is not self.voting:
            before = self.voting  # somebody has added parameters to the optimizer
            self.voting = self._join()
            self.voting.load_state_dict(before.state_dict())
            self.send_flags(before.stop, before.stream_ends)
        if self._settings.node_size > 1:
            self._check_thawed()
        with self.voting.during_backward() if self._overlaps else nullcontext():
            yield

    def after_step(self, stop: bool) -> bool:
        """Return whether some worker wanted to stop, as it said in the step (`send_flags`)."""
        del stop
        stop_agreed, self.voting.stop_agreed = self.voting.stop_agreed, False
        self.stream_ended, self.voting.stream_ended = self.voting.stream_ended, False
        return stop_agreed

    def figures(self) -> dict[str, float]:
        """Return what votes were like; shares of ties, zeros, agreement are of the latest step."""
        return {f"lion/{name}": figure for name, figure in self.voting.figures().items()}

    def cycle(self) -> tuple[Mapping[str, int], int]:
        """Return the bytes that this rank sends in a cycle by tag, and the steps of a cycle."""
        return self.voting.cycle()

    # -- beside the steps

    def follow_parameters(self) -> None:
        """Let master copies follow what has been written to parameters."""
        self._lion.follow_parameters()

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Let floating-point buffers of a checkpoint be their mean over all ranks."""
        for buffer, mean in averaged_buffers(self._module, self._channels.world, BUFFERS_TAG):
            buffer.copy_(mean)

    def fingerprint(self) -> dict[str, str]:
        """Return what all workers must have alike, now and at a resume."""
        return self._settings.fingerprint()

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state of the votes, which all workers have equally."""
        return self.voting.state_dict(), {}

    def load_state_dict(self, shared: dict[str, Any], own: dict[str, Any] | None) -> None:
        """Put back what `state_dict` returned."""
        del own
        self.voting.load_state_dict(shared)

    def adopt(
        self,
        was: Mapping[str, str],
        ranks: int,
        load: Callable[[Iterable[int]], list[dict[str, Any]]],
    ) -> tuple[dict[str, Any], str] | None:
        """Give every worker the momentum that it had, and new workers the mean of all."""
        size, divided = int(was["node_size"]), was.get("inside", _WHOLE) != _WHOLE
        now = self._settings.fingerprint()
        if divided and any(was[name] != now[name] for name in ("node_size", "inside")):
            return None  # these ranks hold other shards
        place = self._channels.within.rank if divided else 0
        workers, between = ranks // size, self._channels.between
        wanted = [between.rank] if between.rank < workers else range(workers)

        found = load(worker * size + place for worker in wanted)
        if not found:
            return None
        own = {name: found[0][name] for name in _OF_WORKER if name in found[0]}
        if len(found) > 1:
            own["optimizers"] = [mean_momenta([one["optimizers"][0] for one in found])]

        said = "every worker takes up the momentum that it had"
        if between.size > workers:
            said += f", workers from {workers} on the mean of all"
        return own, said

    def close(self) -> None:
        """Leave the other workers."""
        self._lion.leave()

    # -- inside

    def _join(self) -> Voting:
        named = agree_on_parameters(self._channels.world, self._module, self._lion.param_groups)
        within, divided = self._channels.within, self._settings.inside != "ddp"
        node, others = (None, within) if divided else (within, None)
        if self._settings.node_size == 1:
            node = None
        return self._lion.join(named, self._channels.between, self._settings, node, others)

    def _trainable(self) -> set[str]:
        return {name for name, p in self._module.named_parameters() if p.requires_grad}

    def _check_thawed(self) -> None:
        """See that DDP averages within a node what is trained; it was told in the beginning."""
        if late := sorted(self._trainable() - self._averaged):
            raise RuntimeError(
                f"The parameters {late} became trainable after the fit had begun, and with"
                f" `node_size={self._settings.node_size}` their gradients are not averaged over a"
                " node. Make them trainable before `fit`, or use `node_size=1`."
            )


def only_lion(strategy: str, optimizers: Sequence[Optimizer]) -> DistributedLion:
    """Return a training's one optimizer.

    Args:
        strategy: for the message.
        optimizers: of the training.

    Raises:
        TypeError: one of them is not `DistributedLion`.
        ValueError: there are several.
    """
    others = [one for one in optimizers if not isinstance(one, DistributedLion)]
    if others:
        optimizer = others[0]
        raise TypeError(
            f"`{strategy}` needs `DistributedLion`, but `configure_optimizers` returned"
            f" `{type(optimizer).__name__}`: a vote has no meaning for another optimizer. Return"
            " `lightning_commfree.DistributedLion(self.parameters(), lr=1e-4, weight_decay=1.0)`,"
            " with a learning rate 3 to 10 times smaller and a weight decay as much larger than"
            " AdamW's, or use the strategy `ddp`."
        )
    if len(optimizers) > 1:
        raise ValueError(
            f"`{strategy}` needs exactly one optimizer, but `configure_optimizers` returned"
            f" {len(optimizers)}: the workers vote on all parameters in one order. Put all"
            " parameters into one `DistributedLion`, with parameter groups where they differ, or"
            " use `StreamingDiLoCoStrategy` or `ddp`."
        )
    (lion,) = optimizers
    return cast(DistributedLion, lion)


def refuse_without_momenta(lion: DistributedLion, step: int) -> None:
    """See that what was loaded is a state of this optimizer's.

    Args:
        lion: has loaded it.
        step: after which it was saved.

    Raises:
        ValueError: there are no momenta.
    """
    if step and not any("momentum" in own for own in lion.state.values()):
        raise ValueError(
            f"The checkpoint was saved after {step} steps and its optimizer state has no momentum,"
            " so it is not one of `DistributedLion`. Resume with the optimizer of the save, or load"
            " the weights alone: `fit` without `ckpt_path`, after `load_from_checkpoint`."
        )
