"""The two parts of a strategy: how ranks share a model, and how replicas are kept together.

*Inside* a replica, one or several ranks hold and compute one model. *Between* replicas, an
algorithm exchanges values that keep them one training. `ReplicaStrategy` calls one of each in the
Trainer's hooks: a new strategy is a new algorithm, or a new layout inside, and some wiring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.job import Mesh
from lightning_commfree.model.weight_swap import WeightSwap
from lightning_commfree.resume.exact import Resumable, State


class Inside(Protocol):
    """How the ranks of a replica hold and compute one model.

    Attributes:
        size: ranks of a replica.
        uses_ddp: Lightning's DDP averages their gradients, and the strategy takes its arguments.
        divides: they hold parts of one model; `prepare` moves what a rank holds to its device.
        same_batch: the ranks of a replica must see the same batch.
        restores_after_setup: the module can take a checkpoint's weights only after `prepare`.
    """

    size: int
    uses_ddp: bool = False
    divides: bool = False
    same_batch: bool = False
    restores_after_setup: bool = False

    def check_before_launch(self, trainer: pl.Trainer | None) -> None:
        """Refuse, in the process that will launch the ranks, what cannot be trained.

        Args:
            trainer: whose state says what runs; None for something that is not a Trainer's.
        """
        return

    def check(self, strategy: Any, trainer: pl.Trainer) -> None:
        """Refuse settings and modules that this layout cannot train, before anything is made."""
        ...

    def prepare(self, strategy: Any) -> None:
        """Start all ranks from the same weights, and prepare the model for this layout.

        Collective; the optimizer is made after it.

        Raises:
            ValueError: the ranks do not agree on settings or module; on all ranks.
        """
        ...

    def mesh(self, world_size: int) -> Mesh:
        """Lay the ranks of a job out; replicas on the first axis, a replica's ranks on the second.

        Raises:
            ValueError: the sizes do not fit.
        """
        ...

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """Check the optimizers, which have just been made.

        Raises:
            ValueError: they cannot train the parameters that `prepare` has made.
        """
        del optimizers

    def accumulating(self) -> AbstractContextManager[None] | None:
        """Keep gradients on this rank in the body: no step follows; None: as Lightning does."""
        return None

    def train_begins(self) -> None:
        """Called when training begins; the state of a resumed fit has been restored."""
        return

    def check_first(self, verb: str, batch: Any) -> None:
        """Check that the ranks of a replica have the same first batch.

        Args:
            verb: "train" or "validate".
            batch: of this rank; tensors in any nesting.

        Raises:
            ValueError: their batches differ; on all ranks of the replica.
        """
        del verb, batch

    def after_backward(self, steps: bool) -> None:
        """Combine the gradients of a batch within the replica; collective within it.

        Args:
            steps: an optimizer step follows, else they accumulate.
        """
        del steps

    def state_dict(self) -> dict[str, Any]:
        """Return what an exact resume of this rank needs besides weights and optimizers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        del state

    def release(self) -> None:
        """Release the model; the fit is over, or has failed."""
        return

    def set_up_evaluation(self, trainer: pl.Trainer, setup: Callable[[pl.Trainer], None]) -> None:
        """Set up the module outside of a fit, by Lightning's `setup` or in place of it."""
        setup(trainer)

    # -- states of a sharded model

    @property
    def saves_folders(self) -> bool:
        """Whether checkpoints are folders now, which all ranks of the first replica write."""
        return False

    def whole_module(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the module's state for a checkpoint: full tensors on rank 0 at least.

        `DTensor`s where a folder is saved. Collective within a replica.

        Args:
            read: returns the state of the module as it is.
        """
        return read()

    def whole_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state for a checkpoint, as `whole_module` returns the module's.

        Args:
            optimizer: of the latest fit.
            state: as the optimizer itself returns it.
        """
        del optimizer
        return state

    def with_module_parts(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a checkpoint with this rank's shards of the module's state."""
        return checkpoint

    def with_optimizer_parts(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a checkpoint with this rank's shards of the optimizers' states.

        They are full in it, or this rank's already: `ExactResume` puts them in.
        """
        return checkpoint


class Between(Resumable, Protocol):
    """An algorithm between replicas, for the length of a fit.

    It is made when model and optimizers are set up and all ranks hold the same weights. Its methods
    run on all ranks after the same step, so that any of them may exchange something. `Resumable`
    has the methods for checkpoints.
    """

    replicas: bool = True
    free_at_resume: frozenset[str] = frozenset()

    def stepping(self) -> AbstractContextManager[None]:
        """Take a step in the body: forward, backward, clipping, update."""
        return nullcontext()

    def after_step(self, stop: bool) -> bool:
        """Exchange what is due after a step, as the fit's clock counts them.

        Args:
            stop: whether this rank wants the training to stop; the others must learn of it.

        Returns:
            Whether all ranks stop now; the same on all ranks.
        """
        ...

    def figures(self) -> dict[str, float]:
        """Return the latest figures by name, for the Trainer's loggers."""
        return {}

    def cycle(self) -> tuple[Mapping[str, float], int]:
        """Return the bytes that this rank sends in a cycle by tag, and the steps of a cycle."""
        ...

    def fingerprint(self) -> dict[str, str]:
        """Return what must be equal on all ranks, and as it was for an exact resume."""
        return {}

    def adopt(
        self, was: Mapping[str, str], ranks: int, load: Callable[[Iterable[int]], list[State]]
    ) -> tuple[State, str] | None:
        """Use nothing of a save by other ranks or with other settings."""
        del was, ranks, load
        return None

    def close(self) -> None:
        """Release resources; the fit is over, or has failed."""


class LocalUpdates(Between, Protocol):
    """An algorithm whose replicas train apart, each on its own weights, between exchanges.

    Attributes:
        step: steps that all replicas have taken.
        weight_swap: the weights that they share.
        stops_after: the step after which all replicas know of a wish to stop that comes now; None:
            it cannot be known.
    """

    step: int
    weight_swap: WeightSwap

    @property
    def stops_after(self) -> int | None:
        """See above; it is read in a signal handler."""
        return None

    def finish(self, stop: bool) -> bool:
        """Make all replicas equal: afterwards the local weights are the shared ones on all of them.

        Args:
            stop: as `after_step` takes it.

        Returns:
            As `after_step`.
        """
        ...

    def wait_in_flight(self) -> None:
        """Wait for exchanges in flight; their results are used when they are due."""

    def shown(self) -> Sequence[Tensor] | None:
        """Return the weights that a validation sees; None: the shared ones."""
        return None

    def unready(self, what: str) -> str | None:
        """Return why the shared weights are not useful yet for a "validation" or "checkpoint"."""
        return None

    def refuse_to_save(self, world: Channel) -> None:
        """Raise, on all ranks, if a checkpoint would hold useless weights."""

    def average_moved(self) -> None:
        """Average frozen weights that hooks have moved apart, before a validation; collective."""


class EveryStep(Between, Protocol):
    """An algorithm that exchanges in every optimizer step: all replicas hold the same weights.

    Attributes:
        stream_ended: the stream of some rank has ended with the latest step; the same on all ranks.
    """

    stream_ended: bool = False

    def send_flags(self, stop: Callable[[], bool], stream_ends: Callable[[], bool]) -> None:
        """Send two flags of this rank with the exchange of every step.

        Args:
            stop: returns whether it wants all to stop; `after_step` returns whether some rank did.
            stream_ends: returns whether its stream ends with this step.
        """
        ...

    def follow_parameters(self) -> None:
        """Accept what hooks have written to the weights before the first step."""

    def average_buffers(self) -> None:
        """Set the buffers of all replicas to their mean, for a validation or checkpoint."""
