"""The `DistributedLion`s that vote with other workers, for the length of a training.

Before they vote, all workers compare the parameters, their order and their groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

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
    channel: Channel, module: nn.Module, groups: Sequence[Mapping[str, Any]], optimizer: str
) -> list[tuple[str, nn.Parameter]]:
    """Name the parameters of an optimizer, in the order of the module; the same on all ranks.

    Args:
        channel: over all ranks; collective.
        module: that holds the parameters.
        groups: `param_groups` of the optimizer.
        optimizer: which one it is.

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

    fingerprint = {"optimizer": optimizer}
    fingerprint |= {f"parameter {name} in group": str(group_of[p]) for name, p in named}
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


class VotingSession:
    """Lets `DistributedLion`s vote with the other workers, through changes of their parameters.

    Each has a voting of its own, which runs when it steps. Several of them, with manual
    optimization, must step in the same order on all ranks.

    Collective over all ranks.

    Args:
        module: has the parameters.
        optimizers: of this rank.
        settings: of the vote.
        channels: between all ranks, the workers, and the ranks of this worker.
        overlaps: votes may start during backward, because nothing changes the gradients after it.

    Attributes:
        stream_ended: some worker's stream has ended with the last step; the same on all of them.
        votings: the current votes, by optimizer.

    Raises:
        ValueError: the ranks do not have the same parameters in the same order and groups.
    """

    name, replicas = "Distributed Lion", True
    free_at_resume: frozenset[str] = frozenset()

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[DistributedLion],
        settings: LionSettings,
        channels: ReplicaChannels,
        overlaps: bool,
    ) -> None:
        self._module, self._lions, self._settings = module, optimizers, settings
        self._channels, self._overlaps = channels, overlaps
        self._view = View.of(channels.between)
        self._averaged = self._trainable()  # what is averaged within a node, by name
        self.stream_ended = False
        self.votings = [self._join(i) for i, _ in enumerate(optimizers)]

    # -- in a step

    def send_flags(self, stop: Callable[[], bool], stream_ends: Callable[[], bool]) -> None:
        """Send two flags with the votes of every step; see `Voting.stop` and `stream_ends`."""
        for voting in self.votings:
            voting.stop, voting.stream_ends = stop, stream_ends

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Vote in the optimizers' steps in the body.

        Raises:
            RuntimeError: parameters of a node of several ranks have become trainable.
        """
        for i, lion in enumerate(self._lions):
            before = self.votings[i]
            if not lion.is_voted_on or lion.voting is not before:
                # somebody has added parameters to the optimizer
                self.votings[i] = self._join(i)
                self.votings[i].load_state_dict(before.state_dict())
                self.send_flags(before.stop, before.stream_ends)
        if self._settings.node_size > 1:
            self._check_thawed()
        with ExitStack() as stack:
            for voting in self.votings if self._overlaps else ():
                stack.enter_context(voting.during_backward())
            yield

    def after_step(self, stop: bool) -> bool:
        """Return whether some worker wanted to stop, as it said in the step (`send_flags`)."""
        del stop
        stop_agreed = any(voting.stop_agreed for voting in self.votings)
        self.stream_ended = any(voting.stream_ended for voting in self.votings)
        for voting in self.votings:  # the next step may not be one of all optimizers
            voting.stop_agreed = voting.stream_ended = False
        return stop_agreed

    def figures(self) -> dict[str, float]:
        """Return figures of the votes for a log; shares are those of the latest step.

        With several optimizers the names end with the optimizer's number.
        """
        several = len(self.votings) > 1
        return {
            f"lion/{name}{f'_{i}' if several else ''}": figure
            for i, voting in enumerate(self.votings)
            for name, figure in voting.figures().items()
        }

    def cycle(self) -> tuple[Mapping[str, int], int]:
        """Return the bytes that this rank sends in a cycle, by tag, and the steps of a cycle.

        As if every optimizer took one step per batch.
        """
        cycles = [voting.cycle() for voting in self.votings]
        return sum((sent for sent, _ in cycles), Counter[str]()), cycles[0][1]

    # -- beside the steps

    def follow_parameters(self) -> None:
        """Update master copies from what has been written to parameters."""
        for lion in self._lions:
            lion.follow_parameters()

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Average the floating-point buffers of a checkpoint over all ranks."""
        for buffer, mean in averaged_buffers(self._module, self._channels.world, BUFFERS_TAG):
            buffer.copy_(mean)

    def fingerprint(self) -> dict[str, str]:
        """Return what must be equal on all workers, now and at a resume."""
        return self._settings.fingerprint()

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state of the votes, which all workers have equally."""
        return {"votings": [voting.state_dict() for voting in self.votings]}, {}

    def load_state_dict(self, shared: dict[str, Any], own: dict[str, Any] | None) -> None:
        """Put back what `state_dict` returned."""
        del own
        for voting, state in zip(self.votings, shared["votings"], strict=True):
            voting.load_state_dict(state)

    def adopt(
        self,
        was: Mapping[str, str],
        ranks: int,
        load: Callable[[Iterable[int]], list[dict[str, Any]]],
    ) -> tuple[dict[str, Any], str] | None:
        """Give every worker the momentum that it had, and a new worker the mean of all."""
        size, divided = int(was["node_size"]), was.get("inside", _WHOLE) != _WHOLE
        now = self._settings.fingerprint()
        if divided and any(was[name] != now[name] for name in ("node_size", "inside")):
            return None  # these ranks hold other shards
        place = self._channels.within.rank if divided else 0
        workers, view = ranks // size, self._view
        wanted = [view.place] if view.place < workers else range(workers)

        found = load(worker * size + place for worker in wanted)
        if not found:
            return None
        own = {name: found[0][name] for name in _OF_WORKER if name in found[0]}
        if len(found) > 1:
            states = zip(*(one["optimizers"] for one in found), strict=True)
            own["optimizers"] = [mean_momenta(of_workers) for of_workers in states]

        said = "every worker takes up the momentum that it had"
        if view.size > workers:
            said += f", workers from {workers} on the mean of all"
        return own, said

    def close(self) -> None:
        """Stop voting: the optimizers are plain Lion again."""
        for lion in self._lions:
            lion.leave()

    # -- inside

    def _join(self, i: int) -> Voting:
        lion, which = self._lions[i], f"{i + 1} of {len(self._lions)}"
        world, groups = self._channels.world, lion.param_groups
        named = agree_on_parameters(world, self._module, groups, which)
        within, divided = self._channels.within, self._settings.inside != "ddp"
        node, others = (None, within) if divided else (within, None)
        if self._settings.node_size == 1:
            node = None
        return lion.join(named, self._view, self._settings, node, others)

    def _trainable(self) -> set[str]:
        return {name for name, p in self._module.named_parameters() if p.requires_grad}

    def _check_thawed(self) -> None:
        """Check that DDP averages all trained parameters: it was told which when the fit began."""
        if late := sorted(self._trainable() - self._averaged):
            raise RuntimeError(
                f"The parameters {late} became trainable after the fit had begun, and with"
                f" `node_size={self._settings.node_size}` their gradients are not averaged over a"
                " node. Make them trainable before `fit`, or use `node_size=1`."
            )


def only_lions(strategy: str, optimizers: Sequence[Optimizer]) -> list[DistributedLion]:
    """Return the optimizers of a training.

    Args:
        strategy: its name, for the message.
        optimizers: of the training.

    Raises:
        TypeError: one of them is not a `DistributedLion`.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, DistributedLion):
            raise TypeError(
                f"`{strategy}` needs `DistributedLion`, but `configure_optimizers` returned"
                f" `{type(optimizer).__name__}`: a vote has no meaning for another optimizer."
                " Return `lightning_commfree.DistributedLion(self.parameters(), lr=1e-4,"
                " weight_decay=1.0)`, with a learning rate 3 to 10 times smaller and a weight decay"
                " as much larger than AdamW's, or use the strategy `ddp`."
            )
    return cast(list[DistributedLion], [*optimizers])


def refuse_without_momenta(lions: Sequence[DistributedLion], step: int) -> None:
    """Check that a loaded optimizer state has momenta.

    Args:
        lions: have loaded it. One that has not stepped yet has none.
        step: after which it was saved.

    Raises:
        ValueError: it has none.
    """
    if step and not any("momentum" in own for lion in lions for own in lion.state.values()):
        raise ValueError(
            f"The checkpoint was saved after {step} steps and its optimizer state has no momentum,"
            " so it is not one of `DistributedLion`. Resume with the optimizer of the save, or load"
            " the weights alone: `fit` without `ckpt_path`, after `load_from_checkpoint`."
        )
