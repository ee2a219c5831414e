"""Interfaces for the two parts of a strategy: its layout and its cross-replica algorithm.

*Inside* a replica, a layout distributes one model over one or more ranks. *Between* replicas, an
algorithm exchanges weights, gradients or votes. A subclass of `ReplicaStrategy` combines the two. A
new layout needs no new strategy (`layouts.choose_layout`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lightning_commfree.comm.job import Mesh
from lightning_commfree.fit.fit import Fit
from lightning_commfree.model.weight_swap import WeightSwap
from lightning_commfree.resume.exact import Resumable


class ShardedStates(Protocol):
    """Interface of sharded layouts: turns their states into those of a checkpoint, and back."""

    @property
    def shares_model(self) -> bool:
        """Whether the ranks of a replica currently hold shards of one model."""

    @property
    def saves_folders(self) -> bool:
        """Whether checkpoints are currently saved as folders, written by all ranks of a replica."""

    def module_state_to_save(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the module's state, full on rank 0 or sharded on every rank; collective.

        Collective within a replica. Rank 0 gets full tensors, and other ranks {}; or, if
        `saves_folders`, each rank gets its own `DTensor`s. `read` returns the module's state, with
        tensors as they are on this rank.
        """

    def optimizer_state_to_save(
        self, optimizer: Optimizer, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Return an optimizer's state for a checkpoint, as `module_state_to_save` does; collective.

        `state` is the optimizer's own `state_dict`.
        """

    def with_module_shards(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a copy of `checkpoint` with the module's state replaced by this rank's shards."""

    def with_optimizer_shards(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a copy of `checkpoint` with optimizer states replaced by this rank's shards.

        The optimizer states in `checkpoint` are full tensors, or already this rank's shards if
        `ExactResume` has restored them.
        """


class Layout(ABC):
    """The layout of a model across the ranks of a replica.

    It must have `size`, `check`, `prepare` and `mesh`; `layouts.ddp.DataParallel` has little more.
    """

    fit: Fit  # the current or latest run of the Trainer, set by the strategy
    size: int  # number of ranks in a replica
    states: ShardedStates | None = None  # None: every rank holds the full model
    # The ranks of a replica must get the same batch, and draw the same random numbers from the
    # first training step on.
    same_batch: bool = False

    @abstractmethod
    def check(self) -> None:
        """Raise a `ValueError` for settings and modules that this layout does not support.

        Called before `prepare` and, unless hooks may still change the module, in the launching
        process, where there are no channels.
        """

    @abstractmethod
    def prepare(self) -> None:
        """Copy rank 0's weights to all ranks and set up the model for this layout; collective.

        If every rank holds the full model, call `Fit.wrap_in_ddp`: several ranks then average
        gradients. A parameter of which a rank holds only a shard becomes a `DTensor`, or is marked
        with `model.shards.mark_shard`.

        Call it before the optimizers are created.

        Raises:
            ValueError: settings or modules differ between ranks; raised on all ranks.
        """

    @abstractmethod
    def mesh(self, world_size: int) -> Mesh:
        """Return the mesh of all ranks: replicas on the first axis, their ranks on the second.

        Raises:
            ValueError: the number of ranks is not a multiple of `size`.
        """

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise a `ValueError` if an optimizer does not fit this layout.

        Called after they are created, and again if a hook replaces them during a fit.

        Raises:
            ValueError: an optimizer cannot train the prepared model's parameters.
        """
        del optimizers

    def backward(self, steps: bool) -> AbstractContextManager[None]:
        """Return a context manager around backward that combines gradients in the replica.

        `steps` is True if an optimizer step follows, and False if gradients are accumulating.
        """
        del steps
        return nullcontext()

    def grad_norm(self, module: nn.Module, norm_type: float) -> Tensor:
        """Return the p-norm of the full model's gradient; collective within the replica."""
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        return get_total_norm(gradients, norm_type)

    def state_dict(self) -> dict[str, Any]:
        """Return the layout's own state on this rank, for an exact resume.

        It contains no weights or optimizer states, which are saved separately.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Restore the state returned by `state_dict`.

        Return messages about state or rounding that the resumed fit will not reproduce.
        """
        del state
        return []

    def release(self) -> None:
        """Clean up after a fit or an error."""
        return


class Algorithm(Resumable, Protocol):
    """A cross-replica algorithm; one object per fit.

    It is created once the model and optimizers are set up and all ranks hold the same weights. Its
    methods run on all ranks after the same step, so any of them but `figures` and `close` may be
    collective. It must have `name`, `after_step`, `cycle`, `state_dict` and `load_state_dict`; all
    others have defaults.
    """

    def stepping(self) -> AbstractContextManager[None]:
        """Return a context manager that wraps a step: forward, backward, clipping and update."""
        return nullcontext()

    def after_step(self) -> None:
        """Count a step, and run the communication that is due after it.

        Called once for each step that `Clock` counts: with manual optimization, for a whole batch
        in which any optimizer has stepped. The header of an exchange contains the strategy's
        `requests.outgoing()`, and when it lands, after the same step on all ranks,
        `requests.incoming` gets the union of all ranks' bits.
        """
        ...

    def figures(self) -> dict[str, float]:
        """Return the latest metrics by name, for the Trainer's loggers."""
        return {}

    def cycle(self) -> tuple[Mapping[str, float], int]:
        """Return the bytes that this rank sends per cycle, by tag, and the steps per cycle.

        A cycle is the period after which the communication pattern repeats.
        """
        ...

    def close(self) -> None:
        """Release resources, after a fit or an error."""
        return


class LocalCopies(Algorithm, Protocol):
    """An algorithm whose replicas train independently on local weights between exchanges.

    Besides what every algorithm must have, it must have `step`, `weight_swap` and `finish`.
    """

    step: int  # number of steps that each replica has taken
    weight_swap: WeightSwap  # swaps the weights shared by all replicas in and out

    def finish(self) -> None:
        """Synchronize fully: all replicas' local weights then equal the shared ones; collective."""
        ...

    def shown(self, what: str) -> Sequence[Tensor] | None:
        """Return weights to swap in, instead of the shared ones, for a validation or checkpoint.

        None selects the shared weights. `what` is "validation" or "checkpoint". It is called before
        each of them, while the module holds the local weights, unless `finish` has just made all
        weights equal; so it may also warn, or average what the replicas have changed differently.
        """
        del what
        return None

    def overwrites(self, shared: dict[str, Any], own: dict[str, Any]) -> set[str]:
        """Return the names of the module's tensors that `load_state_dict` would overwrite.

        By default, all that `weight_swap` exchanges.
        """
        del shared, own
        return self.weight_swap.names

    def restart(self, broadcast: Callable[[], None]) -> None:
        """Drop in-flight exchanges and start over from rank 0's weights.

        `broadcast` copies these into the module on all ranks; call it when nothing is in flight.
        By default, they also become the shared weights.
        """
        broadcast()
        self.weight_swap.take_local()
