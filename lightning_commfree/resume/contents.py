"""What a save contains: every entry, who makes it, and who restores it.

A save of two replicas of one rank each is two files. Rank 0 writes the checkpoint: Lightning's own
entries, and `checkpoint[KEY]`, which `contents` returns. Rank 1 writes `contents(...)["own"]` to
its rank file, with a few words that tell which save the file belongs to (`rank_files`).

Lightning makes its own entries (`dump_checkpoint`) and restores the same on all ranks. What the
strategy decides about them:

    "state_dict"         weights and buffers that are the same for all replicas, as full tensors.
                         `FitSession.module_state` decides which: under Streaming DiLoCo, the outer
                         weights or `LocalCopies.shown`; under Distributed Lion, means of buffers.
                         Of a sharded model, `ShardedStates.module_state_to_save` gathers them on
                         rank 0, or returns `DTensor`s if the checkpoint is a folder. On a resume,
                         `ShardedStates.with_module_shards` gives each rank its shards.
    "current_model_state"  these weights, if `WeightAveraging` puts its averages into "state_dict"
    "optimizer_states"   those of rank 0's replica, in the same way (`optimizer_state_to_save`,
                         `with_optimizer_shards`)
    "loops"              `loops.restore_loops` corrects what Lightning has restored
    "lr_schedulers", the precision plugin's entry, "callbacks", the data module's entry,
    hyperparameters      rank 0's

A save of weights only, or outside of a fit, has no other entries. A resumed fit restores those of
`contents` in three stages, in the order in which `contents` lists them:

1. `restore_by_lightning`, before Lightning restores optimizers: this rank's states replace rank 0's
   in the loaded checkpoint.
2. `restore_weights`, after stage 1, or in `on_train_start` if Lightning loads the weights into a
   model that is already sharded (`ReplicaStrategy.restore_checkpoint_after_setup`).
3. `restore_position`, in `on_train_start`.

If an exact resume is impossible, a rank's own state has only the entries that `Resumable.adopt`
returns. Stages 1 and 2 skip the others, and stage 3 is left out (`ExactResume.restore_position`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_commfree.host import DDPStrategy, pl
from lightning_commfree.model.shards import local_tensors
from lightning_commfree.resume.changes import FitChanges
from lightning_commfree.resume.copies import Ranks
from lightning_commfree.resume.data_position import (
    LoaderOrder,
    batches_ahead,
    half_accumulated,
    loader_states,
    not_saved,
    random_state,
    restore_data_position,
    training_loaders,
)
from lightning_commfree.resume.hook_changes import HookChanges, named_tensors
from lightning_commfree.resume.loader_parts import order_state, sizes_of
from lightning_commfree.resume.own_tensors import OwnTensors
from lightning_commfree.resume.rank_files import plain_or_none

if TYPE_CHECKING:
    from lightning_commfree.resume.exact import Resumable, ResumableLayout

KEY = "lightning_commfree"  # key of the additional entry in a checkpoint
ENTRY = {"ranks", "token", "folder", "algorithm", "fingerprint", "shared", "own"}  # its keys

State = dict[str, Any]


@dataclass
class SavedFit:
    """The objects of a fit whose states a save contains."""

    strategy: DDPStrategy
    trainer: pl.Trainer
    ranks: Ranks
    layout: ResumableLayout
    algorithm: Resumable
    tensors: OwnTensors
    changes: FitChanges


def contents(
    fit: SavedFit, checkpoint: State, token: str, folder: str, left_out: Iterable[str]
) -> State:
    """Return what this library adds to Lightning's `checkpoint`, without copying; collective.

    `left_out` contains the names of the tensors that are not in the checkpoint's `state_dict`.
    """
    shared, own = fit.algorithm.state_dict()
    return {
        # the save: its number of ranks, its id, and the folder of its rank files (`exact.Save`)
        "ranks": fit.ranks.size,
        "token": token,
        "folder": folder,
        # an exact resume needs the same algorithm and settings (`Save.why_not_exact`)
        "algorithm": fit.algorithm.name,
        "fingerprint": fit.algorithm.fingerprint(),
        # the algorithm's state that all replicas share (DiLoCo: outer weights and optimizer), with
        # rank 0's shards; restored by `restore_weights`
        "shared": local_tensors(shared),
        # this rank's own state; other ranks' are in their rank files
        "own": local_tensors(_own_state(fit, checkpoint, left_out, shared, own)),
    }


def _own_state(
    fit: SavedFit, checkpoint: State, left_out: Iterable[str], shared: State, algorithm: State
) -> State:
    """Return this rank's own state, in the order in which it is restored; collective."""
    strategy, trainer, channels = fit.strategy, fit.trainer, fit.ranks.channels
    one_model, loaders = channels.one_model, training_loaders(trainer)
    own = {
        # -- 1. `restore_by_lightning`
        # Each replica has its own optimizers and gradient scaler; of a model that all ranks share,
        # the checkpoint has them in full. Lightning's method: the strategy's own gathers shards.
        "optimizers": None
        if one_model
        else [DDPStrategy.optimizer_state(strategy, one) for one in strategy.optimizers],
        "precision": None if one_model else strategy.precision_plugin.state_dict(),
        # None if they need pickle: then rank 0's
        "schedulers": plain_or_none(checkpoint.get("lr_schedulers")),
        # of the parameters; restored by nobody, but `restore_dtypes` needs them (`saved_dtypes`)
        "dtypes": sorted({str(p.dtype) for p in trainer.lightning_module.parameters()}),
        # -- 2. `restore_weights`
        # changed tensors that "state_dict" lacks, and untrained ones that differ from rank 0's
        "tensors": {
            **fit.tensors.changed(left_out),
            **({} if one_model else fit.tensors.state(channels)),
        },
        # the algorithm's state on this rank (DiLoCo: local weights, fragments in flight)
        "algorithm": algorithm,
        # the algorithm's shared state with this rank's shards, where they are not rank 0's
        "shared": shared if channels.within.rank else None,
        # DDP's order of buckets; random numbers and schedules of a tensor group
        "layout": fit.layout.state_dict(),
        # -- 3. `restore_position`
        # settings that hooks change: `accumulate_grad_batches`, and which parameters are frozen
        "changes": fit.changes.state_dict(),
        # the position in the data (`restore_data_position`): random numbers of this process, ...
        "random": random_state(strategy.root_device),
        # ... and, per loader, those from which it has drawn the epoch's order
        "starts": [order and order.start for order in map(LoaderOrder.of, loaders)],
        # its generators and epochs
        "order": [*map(order_state, loaders)],
        # states of the loaders with a `state_dict`; None if they need pickle: then rank 0's
        "loaders": plain_or_none(loader_states(checkpoint)),
        # batches that Lightning has read ahead; None if they need pickle: then they are skipped
        "ahead": plain_or_none(batches_ahead(trainer)),
        # lengths, batch sizes and samplers' seeds of the loaders, only compared
        "sizes": [*map(sizes_of, loaders)],
        # gradients of a partially accumulated step, by parameter
        "gradients": half_accumulated(trainer),
    }
    # messages about state that could not be saved, for the user who resumes
    own["lost"] = not_saved(trainer, checkpoint, own)
    return own


def saved_dtypes(checkpoint: Mapping[str, Any]) -> list[str]:
    """Return the dtypes that the parameters had when a checkpoint was saved, as strings.

    The weights in it may have other dtypes: `WeightAveraging` replaces them by its averages.
    """
    found: list[str] = checkpoint.get(KEY, {}).get("own", {}).get("dtypes", [])
    return found


def precision_entry(strategy: DDPStrategy) -> str:
    """Return the key of the precision plugin's entry in a checkpoint."""
    return type(strategy.precision_plugin).__qualname__


def keep_hook_changes(fit: SavedFit, own: State, checkpoint: State, changes: HookChanges) -> None:
    """Remove entries of a rank's own state that would undo the hooks' changes; add a message."""
    if not str(changes):
        return
    text = f"`on_load_checkpoint` changed {changes}"
    if changes.loaders:
        own["loaders"] = None  # Lightning loads the positions in the checkpoint

    tensors = named_tensors(fit.trainer.lightning_module)
    # by id: a tied weight has several names
    changed = {id(tensors[name]) for name in changes.weights if name in tensors}
    for key in own.keys() & {"tensors", "gradients"}:
        own[key] = {n: t for n, t in own[key].items() if id(tensors.get(n)) not in changed}
    names: set[str] = set()
    if "algorithm" in own:
        names = fit.algorithm.overwrites(own["shared"], own["algorithm"])
    unknown = (changes.weights - tensors.keys()) & checkpoint["state_dict"].keys()
    if names and (unknown or any(id(tensors.get(name)) in changed for name in names)):
        del own["algorithm"]
        text += (
            ", so every rank starts from the checkpoint's weights, and the state of"
            f" {fit.algorithm.name} starts over"
        )
    own["lost"] = [*own.get("lost", []), text]


def restore_by_lightning(
    fit: SavedFit, own: State, checkpoint: State, changes: HookChanges | None
) -> None:
    """Replace rank 0's states in a loaded checkpoint by this rank's, for Lightning to restore.

    What hooks have changed in them (`changes`) stays changed.
    """
    for key, entry in (
        ("optimizers", "optimizer_states"),
        ("precision", precision_entry(fit.strategy)),
        ("schedulers", "lr_schedulers"),
    ):
        state = own.get(key)
        if state and entry in checkpoint:  # a gradient scaler rejects an empty state
            checkpoint[entry] = state if changes is None else changes.keep(entry, state)


def restore_weights(fit: SavedFit, own: State) -> None:
    """Restore this rank's own tensors, the algorithm and the layout."""
    # first the tensors, because the algorithm overwrites those that it exchanges
    fit.tensors.load(own.get("tensors", {}))
    if "algorithm" in own:
        fit.algorithm.load_state_dict(own["shared"], own["algorithm"])
    if "layout" in own:
        own["lost"] = [*own["lost"], *fit.layout.load_state_dict(own["layout"])]


def restore_position(fit: SavedFit, own: State) -> tuple[list[str], list[str]]:
    """Restore settings, loops, position in the data and gradients; return two message lists.

    The lists describe lost state, and objects whose state may be incomplete.
    """
    # before the loops, which count steps by `accumulate_grad_batches`
    changed = fit.changes.load_state_dict(own["changes"])
    lost, unknown = restore_data_position(fit.trainer, own)
    for name, gradient in own.get("gradients", {}).items():
        parameter = fit.trainer.lightning_module.get_parameter(name)
        parameter.grad = gradient.to(parameter.device, parameter.dtype)
    return [*own["lost"], *changed, *lost], unknown
