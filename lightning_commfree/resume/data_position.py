"""Save and restore a rank's position in an epoch: RNG state, loaders, gradients.

Lightning restores its loops, whose state `resume.loops` corrects. It does not restore the RNG state
or partially accumulated gradients, and a loader without a `state_dict` would start over at the
epoch's first batch.

A shuffling loader draws from the global random number generator or from its own
(`DataLoader(generator=...)`). Without worker processes, it draws when its first batch is read. With
workers, it draws when its iterator is created, which also seeds the workers. `EpochStart` records
the RNG state at both points, and a resumed fit restores it at both points. It treats an epoch that
was set on a sampler or a data set in the same way (`loader_parts`).
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat
from typing import Any, cast

import torch
from lightning_utilities.core.imports import module_available
from torch import Tensor

from lightning_commfree.host import CombinedLoader, pl
from lightning_commfree.lightning_internals import (
    MID_EPOCH,
    Patches,
    data_fetcher,
    epoch_metrics,
    in_accumulation,
    set_last_reload,
    take_loader_states,
)
from lightning_commfree.resume.loader_parts import (
    OrderState,
    length_of,
    order_state,
    private_generators,
    replays,
    set_order,
    sizes_of,
    unknown_parts,
)
from lightning_commfree.resume.loops import (
    Moment,
    restore_loops,
    skipped_hooks,
    start_in_epoch,
    unknown_parts_of_fit,
)
from lightning_commfree.resume.rank_files import plain_or_none

# "random": the host's RNG state; "order": the `order_state` of every loader
GeneratorStates = dict[str, Any]


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the RNG state of Python, numpy, torch and a CUDA device.

    The state consists of tensors and plain values, which `weights_only=True` can load.
    """
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        # a tensor, because `plain_or_none` and `map_nested` would visit each of the 625 numbers
        "python": (version, torch.tensor(numbers), gauss),
    }
    if device.type == "cuda":  # only this rank's device: a resumed fit may see different devices
        states["device"] = torch.cuda.get_rng_state(device)
    if module_available("numpy"):
        import numpy as np

        state: Any = np.random.get_state()
        kind, keys, *rest = state
        states["numpy"] = (kind, torch.tensor(keys.astype(np.int64)), *rest)
    return states


def set_random_state(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore the RNG state returned by `random_state`."""
    torch.set_rng_state(states["torch"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    if "numpy" in states and module_available("numpy"):
        import numpy as np

        kind, keys, *rest = states["numpy"]
        np.random.set_state((kind, keys.numpy(), *rest))
    if device.type == "cuda" and "device" in states:
        torch.cuda.set_rng_state(states["device"].cpu(), device)


def set_generator_states(state: GeneratorStates | None, loaders: Sequence[object]) -> None:
    """Restore the global RNG state (on the CPU), and the loaders' own generators and epochs.

    If `state` is None, nothing is restored.
    """
    if state is not None:
        set_random_state(state["random"], torch.device("cpu"))
        set_order(state["order"], loaders)


def set_epoch(epoch: int, loaders: Iterable[object]) -> None:
    """Call `set_epoch` on the loaders' samplers that have this method.

    Such samplers derive their order from the epoch.
    """
    for loader in loaders:
        for owner in (loader, getattr(loader, "batch_sampler", None)):
            sampler: Any = getattr(owner, "sampler", None)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)


class EpochStart:
    """Records the RNG state at two points at the start of each epoch.

    1. Before the epoch's iterator is created: in the first epoch, when Lightning prepares the
       loaders; in later epochs, when Lightning's loop begins the epoch.
    2. Before the epoch's first batch is read.

    If there are several loaders of different lengths, a shorter one may restart in the middle of an
    epoch; the RNG state at this point is not recorded.

    Create this object before the Trainer creates its loaders. It wraps two methods of the Trainer's
    strategy and loop; `patches.remove` restores the original methods.

    Attributes:
        iterator: the state before this epoch's iterator was created; None if it has not been
            created yet.
        batch: the state before this epoch's first batch was read; None if it has not been read yet.
    """

    def __init__(self, trainer: pl.Trainer, patches: Patches) -> None:
        self._trainer, self._restored = trainer, False
        self.iterator: GeneratorStates | None = None
        self.batch: GeneratorStates | None = None
        # the states when a training loader was last prepared
        self._host: dict[str, Any] | None = None
        self._prepared: list[tuple[Any, OrderState]] = []
        strategy, loop = trainer.strategy, trainer.fit_loop.epoch_loop
        prepare, begin = strategy.process_dataloader, loop.on_run_start

        def record_and_prepare(loader: object) -> object:
            if not trainer.training:  # a validation loader
                return prepare(loader)
            self._host, order = random_state(torch.device("cpu")), order_state(loader)
            prepared = prepare(loader)
            self._prepared.append((prepared, order))
            return prepared

        def record_and_begin(fetcher: Any) -> None:
            before, made = self._now(), fetcher.iterator
            # clear it to detect whether `begin` creates a new one; in the first epoch it does not
            fetcher.iterator = None
            begin(fetcher)
            is_new = fetcher.iterator is not None
            if not is_new:
                fetcher.iterator = made

            if self._restored:  # this epoch began before the save
                self._restored = False
                return
            self.iterator = before if is_new else self._when_prepared()
            self.batch = self._now()
            self._prepared = []  # loaders may have been replaced

        patches.put(strategy, "process_dataloader", record_and_prepare)
        patches.put(loop, "on_run_start", record_and_begin)

    def state_dict(self) -> dict[str, Any]:
        """Return the RNG states recorded for this epoch, and the loaders' current states.

        "iterator" and "batch" contain the recorded states, or None if they have not been recorded
        yet. "now" contains the current states of the loaders' own generators, and their epochs.
        """
        iterator = self._when_prepared() if self.iterator is None else self.iterator
        return {"iterator": iterator, "batch": self.batch, "now": self._now()["order"]}

    def load_state_dict(self, state: dict[str, Any], begun: bool) -> None:
        """Restore the recorded states.

        If the fit resumes within the recorded epoch, pass `begun=True`, so that these states are
        kept when Lightning's loop begins this epoch again.
        """
        self.iterator, self.batch, self._restored = state["iterator"], state["batch"], begun

    def _now(self) -> GeneratorStates:
        order = [*map(order_state, training_loaders(self._trainer))]
        return {"random": random_state(torch.device("cpu")), "order": order}

    def _when_prepared(self) -> GeneratorStates | None:
        """Return the state recorded when the loaders were prepared; None if they were not."""
        if self._host is None:
            return None
        order = [
            next((order for one, order in self._prepared if one is loader), order_state(loader))
            for loader in training_loaders(self._trainer)
        ]
        return {"random": self._host, "order": order}


def training_loaders(trainer: pl.Trainer) -> list[Any]:
    """Return the training loaders, or an empty list before Lightning has prepared them."""
    loaders = trainer.train_dataloader
    return [] if loaders is None else CombinedLoader(loaders).flattened


def data_state(trainer: pl.Trainer, checkpoint: Mapping[str, Any], epoch_start: EpochStart) -> Any:
    """Return this rank's position in the training data, for a checkpoint.

    "loaders" contains the states of loaders with a `state_dict`, or None if they need pickle; on
    resume, Lightning then restores rank 0's states on every rank. "ahead" contains the prefetched
    batches (a single batch if the data has no length), or None if they need pickle. "epoch_start"
    and "random" contain RNG states. "sizes" contains lengths and batch sizes of the loaders.
    """
    works = MID_EPOCH.works(trainer)
    ahead = getattr(data_fetcher(trainer), "batches", []) if works else []
    return {
        "random": random_state(trainer.strategy.root_device),
        "epoch_start": epoch_start.state_dict(),
        "loaders": plain_or_none(_loader_states(checkpoint)),
        "ahead": plain_or_none([*ahead]),
        "sizes": [sizes_of(loader) for loader in training_loaders(trainer)],
    }


def half_accumulated(trainer: pl.Trainer) -> dict[str, Tensor]:
    """Return partially accumulated gradients by parameter name, without copying them.

    The dict is empty right after an optimizer step. With manual optimization, all gradients are
    returned, because only the module knows whether it will use them.
    """
    module = trainer.lightning_module
    if module.automatic_optimization and not in_accumulation(trainer):
        return {}
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


EPOCH_METRICS = "cover only the batches after the resume"


def not_saved(
    trainer: pl.Trainer, checkpoint: Mapping[str, Any], own: Mapping[str, Any]
) -> list[str]:
    """Return messages about state that is lost if a checkpoint is saved now."""
    texts = needing_pickle(checkpoint, own, trainer.world_size)
    if in_accumulation(trainer) and not own["gradients"]:
        texts.append(
            "the gradients of a partially accumulated optimizer step are lost: FSDP exposes them"
            " only at the step"
        )
    epoch: Any = trainer.fit_loop.epoch_progress.current
    if epoch.processed != epoch.started and (names := epoch_metrics(trainer)):
        texts.append(
            f"the epoch's values of {', '.join(map(repr, names))} {EPOCH_METRICS}, because"
            " Lightning does not save metrics"
        )
    return texts + skipped_hooks(trainer) + _skipped_schedulers(trainer)


def needing_pickle(checkpoint: Mapping[str, Any], own: Mapping[str, Any], ranks: int) -> list[str]:
    """Return messages about state that needs pickle, which a rank file cannot contain."""
    shared = "contains objects other than tensors and plain values, so every rank gets rank 0's"
    texts = []
    # a single rank loses nothing: Lightning saves its state
    if ranks > 1 and own["loaders"] is None and _loader_states(checkpoint):
        texts.append(f"the state of a training data loader {shared}")
    if ranks > 1 and own["schedulers"] is None and checkpoint.get("lr_schedulers"):
        texts.append(f"the state of a learning-rate scheduler {shared}")
    if own["ahead"] is None:
        texts.append(
            "a prefetched batch is skipped: it contains objects other than tensors and plain"
            " values, which a rank file cannot save"
        )
    return texts


def _skipped_schedulers(trainer: pl.Trainer) -> list[str]:
    """Return messages about schedulers that monitor a metric and will skip a step after a resume.

    Lightning does not save metrics, so such a scheduler does not step for the batch after which the
    checkpoint was saved, or at the end of that epoch.
    """
    epoch: Any = trainer.fit_loop.epoch_progress.current
    if epoch.completed == epoch.started:  # the scheduler has stepped for the last epoch
        return []
    return [
        f"the scheduler that monitors {config.monitor!r} skips one step, because Lightning does not"
        " save metrics. To resume exactly, save in `on_train_epoch_start`, or use a scheduler that"
        " does not monitor a metric"
        for config in trainer.lr_scheduler_configs
        if config.reduce_on_plateau
    ]


def _loader_states(checkpoint: Mapping[str, Any]) -> Any:
    loops: Any = checkpoint.get("loops", {})
    return loops.get("fit_loop", {}).get("state_dict", {}).get("combined_loader")


_OTHER_ORDER = (
    "the training data may be different, or in a different order: `{}` has its own random number"
    " generator, which is not saved. Use a `torch.Generator`, or a loader with a `state_dict`"
)
_UNKNOWN_POSITION = (
    "training data with neither a length nor a `state_dict` starts with its first batch. Implement"
    " `state_dict` and `load_state_dict` in the loader"
)
_OTHER_LOADERS = (
    "the training loaders have other samplers, generators or epochs than at the save, so their"
    " data may be in a different order"
)


def restore_data_position(
    trainer: pl.Trainer, epoch_start: EpochStart, own: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Restore the loops, the loaders and the RNG state, right before training starts.

    1. If the checkpoint was saved in the middle of an epoch: regenerate the epoch's order from the
       recorded RNG state, read and discard the batches already trained on, then restore the RNG
       state.
    2. If it was saved at the end of an epoch, or after its last batch: restore the RNG state.
       Lightning then creates the next epoch's iterator, which uses it.

    Loaders with a `state_dict` restore their own position, unless `replays` says otherwise.

    Args:
        trainer: the Trainer that resumes the fit.
        epoch_start: receives the saved RNG states from the epoch's start.
        own: this rank's own state, with the entries from `data_state`.

    Returns:
        Messages about state that could not be restored, and descriptions of loaders, samplers and
        data sets whose state may be incomplete.
    """
    loop = trainer.fit_loop
    opened = loop.restarted_on_epoch_start  # saved in `on_train_epoch_start`
    moment = restore_loops(trainer)
    loaders = training_loaders(trainer)
    if every := int(cast(Any, trainer).reload_dataloaders_every_n_epochs):
        latest = moment.epoch if moment.begun or opened else max(moment.epoch - 1, 0)
        set_last_reload(trainer, latest // every * every)
    set_epoch(moment.epoch, loaders)

    at_batch = (moment.begun and not moment.trained) or (not moment.begun and moment.epoch == 0)
    # Lightning does not load these itself if it considers the epoch finished
    later = take_loader_states(trainer)
    states = own["loaders"] or later
    if states:
        stateful = [loader for loader in loaders if hasattr(loader, "load_state_dict")]
        for loader, state in zip(stateful, states, strict=True):
            if not replays(loader):
                _load_loader(loader, state, at_end=not at_batch)

    texts: list[str] = []
    for loader in filter(replays, loaders):
        texts += map(_OTHER_ORDER.format, private_generators(loader))
    if at_batch and MID_EPOCH.works(trainer):
        epoch_start.load_state_dict(own["epoch_start"], begun=moment.begun)
        texts += _restore_iterator(trainer, moment, bool(states), own["ahead"] or [], epoch_start)
    set_random_state(own["random"], trainer.strategy.root_device)
    if not set_order(own["epoch_start"]["now"], loaders):
        texts.append(_OTHER_LOADERS)
    sizes = [sizes_of(loader) for loader in loaders]
    if sizes != own.get("sizes", sizes):  # absent from the state of other groups of ranks
        texts.append(
            f"the training loaders have other numbers of batches or batch sizes ({sizes}) than at"
            f" the save ({own['sizes']}), so the position in the data does not match"
        )
    # an epoch of which only the end is left is over for the loaders
    batches, epoch = (moment.batches, moment.epoch) if at_batch else (0, moment.epoch + 1)
    unknown = [unknown_parts(loader, batches, epoch) for loader in loaders]
    return texts, [*chain.from_iterable(unknown), *unknown_parts_of_fit(trainer, moment)]


def _load_loader(loader: Any, state: Any, at_end: bool) -> None:
    """Load a loader's state; `at_end`: the state of an epoch's end."""
    loader.load_state_dict(state)
    # Some loaders go on where their state was saved, and yield nothing before they begin the next
    # epoch. Others begin it at once: give them back the batch that finding out has cost.
    if at_end and next(iter(loader), None) is not None:
        loader.load_state_dict(state)


class _Placed:
    """Wrapper of a loader that is at its position already: yields placeholders for `count` batches.

    Then, and if it starts again within the epoch, it yields the loader's batches.
    """

    def __init__(self, loader: Any, count: int) -> None:
        self._loader, self._count = loader, count

    def __iter__(self) -> Iterator[Any]:
        count, self._count = self._count, 0
        return chain(repeat(None, count), iter(self._loader))

    def __len__(self) -> int:
        return len(self._loader)


def _restore_iterator(
    trainer: pl.Trainer, moment: Moment, loaded: bool, ahead: Sequence[Any], epoch_start: EpochStart
) -> list[str]:
    """Create an epoch's iterator and skip the batches already trained on.

    Return messages about loaders whose position cannot be restored.
    """
    fetcher, loaders = data_fetcher(trainer), training_loaders(trainer)
    over = fetcher.length is None  # then a loader without a length and a state starts over
    lost = [over and replays(one) and math.isinf(length_of(one)) for one in loaders]
    again = [replays(one) and not is_lost for one, is_lost in zip(loaders, lost, strict=True)]
    texts = [_UNKNOWN_POSITION] if any(lost) and moment.batches else []
    if not (loaded or any(again)):
        return texts

    for loader in (one for one, is_read in zip(loaders, again, strict=True) if is_read):
        # its persistent workers were seeded before this restore, or Lightning has loaded its state
        stale = moment.epoch == 0 or hasattr(loader, "load_state_dict")
        if stale and getattr(loader, "_iterator", None) is not None:
            loader._iterator = None
    combined, count = fetcher.combined_loader, moment.batches + len(ahead)
    set_generator_states(epoch_start.iterator, loaders)
    combined.flattened = [
        one if is_read else _Placed(one, count) for one, is_read in zip(loaders, again, strict=True)
    ]
    fetcher.iterator = iter(combined)  # `iter(fetcher)` would read ahead
    combined.flattened = loaders
    fetcher.reset()
    set_generator_states(epoch_start.batch, loaders)
    for _ in range(count):
        next(fetcher.iterator)  # not `next(fetcher)`: Lightning has already restored its counters
    if fetcher.length is None and hasattr(fetcher, "batches"):
        fetcher.batches = [*ahead] or [next(fetcher.iterator)]
    return texts


# -- joining a fit that other replicas have already started


class _SkippingSampler:
    """Sampler wrapper that skips the first `count` samples, but only on the first iteration."""

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler, self._count = sampler, count

    def __iter__(self) -> Iterator[Any]:
        count, self._count = self._count, 0
        return islice(iter(self._sampler), count, None)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def continue_at(trainer: pl.Trainer, step: int) -> None:
    """Start a joining replica's fit at `step`, without reading the earlier batches.

    Call this in `on_train_start`. It also advances the learning-rate schedulers to `step`, except
    those that monitor a metric.

    Raises:
        RuntimeError: the training data has no length or no sampler.
    """
    every, total = trainer.accumulate_grad_batches, trainer.num_training_batches
    loaders = training_loaders(trainer)
    samplers = [getattr(getattr(one, "batch_sampler", None), "sampler", None) for one in loaders]
    if math.isinf(total) or None in samplers:
        raise RuntimeError(
            "A joining replica can determine its position in the data only if the training"
            " dataloader has a length and a sampler. Use a map-style dataset."
        )
    epoch, steps = divmod(step, -(-int(total) // every))
    batches = steps * every
    start_in_epoch(trainer, step, epoch, batches)
    set_epoch(epoch, loaders)
    for loader, sampler in zip(loaders, samplers, strict=True):
        loader._iterator = None  # persistent workers have read the first batches
        if batches:
            loader.batch_sampler.sampler = _SkippingSampler(sampler, batches * loader.batch_size)
    if batches:
        iter(data_fetcher(trainer))
    step_schedulers(trainer, step, epoch)


def step_schedulers(trainer: pl.Trainer, step: int, epoch: int) -> None:
    """Advance the learning-rate schedulers to their state after `step` steps and `epoch` epochs.

    Schedulers that monitor a metric are not advanced.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        for config in trainer.lr_scheduler_configs:
            count = (step if config.interval == "step" else epoch) // config.frequency
            scheduler: Any = config.scheduler
            while not config.reduce_on_plateau and scheduler.last_epoch < count:
                scheduler.step()
