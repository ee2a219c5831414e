"""Save and restore a rank's position in an epoch: RNG state, loaders, gradients.

Lightning restores its loops, whose state `resume.loops` corrects. It does not restore the RNG state
or partially accumulated gradients, and a loader without a `state_dict` would start over at the
epoch's first batch.

A fit that resumes, and an elastic replica that joins, find their position in one way
(`_place_iterator`): where a loader has a sampler, `LoaderOrder` skips batches without reading them.
A resumed fit draws the epoch's order again from the RNG state that `LoaderOrder` recorded when the
order was drawn, and then restores the RNG state of the save.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat, zip_longest
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
    changed_numbers,
    has_sampler,
    length_of,
    numbers_in_data,
    order_state,
    private_generators,
    replays,
    set_order,
    sizes_of,
    unknown_parts,
)
from lightning_commfree.resume.loops import (
    restore_loops,
    skipped_hooks,
    start_in_epoch,
    unknown_parts_of_fit,
)

States = dict[str, Any]  # "random": the host's RNG state; "order": `order_state` of a loader
NEW_EPOCH: tuple[None, int] = None, 0  # a `LoaderOrder.plan`
_CPU = torch.device("cpu")


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


def set_epoch(epoch: int, loaders: Iterable[object]) -> None:
    """Call `set_epoch` on the loaders' samplers that have this method.

    Such samplers derive their order from the epoch.
    """
    for loader in loaders:
        for owner in (loader, getattr(loader, "batch_sampler", None)):
            sampler: Any = getattr(owner, "sampler", None)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)


class LoaderOrder:
    """Takes the place of a loader's sampler in an epoch's iterator, and can skip batches."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._sampler = vars(loader)[self._name]
        self.numbers = numbers_in_data(loader)
        # the RNG state from which the sampler has drawn the epoch's order, with the states of the
        # loader's own generators and epochs; None before it has
        self.start: States | None = None
        # For the loader's next iterator: the state from which it draws the order (None: the current
        # one), and the number of batches that it skips. None if the user creates the iterator.
        self.plan: tuple[States | None, int] | None = NEW_EPOCH
        self._create = type(loader)._get_iterator  # fails here, not silently, if torch drops it
        vars(loader)["_get_iterator"] = self.get_iterator  # a bound method, so it can be pickled

    @staticmethod
    def of(loader: object) -> LoaderOrder | None:
        """Return the object that was created for a loader; None if it has no sampler."""
        owner = getattr(getattr(loader, "_get_iterator", None), "__self__", None)
        return owner if isinstance(owner, LoaderOrder) else None

    def detach(self) -> None:
        """Restore the loader's own way of creating iterators."""
        vars(self.loader).pop("_get_iterator", None)

    def get_iterator(self) -> Any:
        """Create the loader's iterator, with this object in place of its sampler."""
        attributes, now = vars(self.loader), self._states()
        start = self.plan and self.plan[0]
        if start:
            set_order([start["order"]], [self.loader])  # worker processes copy the data set
        attributes[self._name] = self  # a `DataLoader` does not let its sampler be set
        try:
            return self._create(self.loader)
        finally:
            attributes[self._name], self.plan = self._sampler, None
            if start:
                self._set_states(now)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        plan = self.plan
        if vars(self.loader)[self._name] is not self:  # else it may be called twice, with workers
            self.plan = None
        return iter(self._sampler) if plan is None else self._draw_order(*plan)

    def _draw_order(self, start: States | None, count: int) -> Iterator[Any]:
        """Draw the order from the RNG state `start` or the current one; skip `count` batches."""
        now = self._states()
        self.start = start or now
        if start:
            self._set_states(start)
        batches = iter(self._sampler)
        first = [*islice(batches, count, count + 1)]  # a sampler may draw when it is first read
        if start:
            self._set_states(now)
        yield from chain(first, batches)

    def _states(self) -> States:
        """Return the host's RNG state, and the loader's generators and epochs."""
        return {"random": random_state(_CPU), "order": order_state(self.loader)}

    def _set_states(self, states: States) -> None:
        """Restore the states that `_states` returned."""
        set_random_state(states["random"], _CPU)
        set_order([states["order"]], [self.loader])


def attach_order(trainer: pl.Trainer, loader: object) -> None:
    """Attach a `LoaderOrder` to a loader that trains and has a sampler (`LoaderOrder.of`)."""
    if trainer.training and has_sampler(loader):
        LoaderOrder(loader)


def plan_epochs(trainer: pl.Trainer, patches: Patches) -> None:
    """Patch the Trainer: an iterator that it creates for an epoch draws a new order."""
    loop = trainer.fit_loop.epoch_loop
    begin = loop.on_run_start

    def plan_and_begin(fetcher: Any) -> None:
        """Begin the epoch; an iterator that Lightning creates in it draws a new order."""
        orders = training_orders(trainer)
        before = [order.plan for order in orders]
        for order in orders:
            order.plan = NEW_EPOCH
        # clear it to detect whether `begin` creates a new one; in the first epoch it does not
        made, fetcher.iterator = fetcher.iterator, None
        begin(fetcher)
        if fetcher.iterator is None:
            fetcher.iterator = made
            for order, plan in zip(orders, before, strict=True):
                order.plan = plan

    patches.put(loop, "on_run_start", plan_and_begin)


def training_orders(trainer: pl.Trainer) -> list[LoaderOrder]:
    """Return the `LoaderOrder` of each training loader that has a sampler."""
    orders = map(LoaderOrder.of, training_loaders(trainer))
    return [order for order in orders if order is not None]


def training_loaders(trainer: pl.Trainer) -> list[Any]:
    """Return the training loaders, or an empty list before Lightning has prepared them."""
    loaders = trainer.train_dataloader
    return [] if loaders is None else CombinedLoader(loaders).flattened


def batches_ahead(trainer: pl.Trainer) -> list[Any]:
    """Return the prefetched batches: usually one if the data has no length, otherwise none."""
    if not MID_EPOCH.works(trainer):
        return []
    return [*getattr(data_fetcher(trainer), "batches", [])]


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
    for order in training_orders(trainer):
        texts += changed_numbers(order.loader, order.numbers)
    return texts + skipped_hooks(trainer) + _skipped_schedulers(trainer)


def needing_pickle(
    checkpoint: Mapping[str, Any], own: Mapping[str, Any], num_ranks: int
) -> list[str]:
    """Return messages about state that needs pickle, which a rank file cannot contain."""
    shared = "contains objects other than tensors and plain values, so every rank gets rank 0's"
    texts = []
    # a single rank loses nothing: Lightning saves its state
    if num_ranks > 1 and own["loaders"] is None and loader_states(checkpoint):
        texts.append(f"the state of a training data loader {shared}")
    if num_ranks > 1 and own["schedulers"] is None and checkpoint.get("lr_schedulers"):
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


def loader_states(checkpoint: Mapping[str, Any]) -> Any:
    """Return the states of the training loaders in a checkpoint, or None."""
    loops: Any = checkpoint.get("loops", {})
    return loops.get("fit_loop", {}).get("state_dict", {}).get("combined_loader")


_OTHER_ORDER = (
    "the training data may be different, or in a different order: `{}` has its own random number"
    " generator, which is not saved. Use a `torch.Generator`, or a loader with a `state_dict`"
)
_OTHER_LOADERS = (
    "the training loaders have other samplers, generators or epochs than at the save, so their"
    " data may be in a different order"
)


def restore_data_position(
    trainer: pl.Trainer, own: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Restore the loops, loaders and RNG state before training starts; return two message lists.

    The lists describe lost state, and loaders, samplers and data sets whose state may be
    incomplete.
    """
    # if the checkpoint was saved at the end of an epoch, Lightning later creates the next epoch's
    # iterator from the RNG state that is restored here
    loop = trainer.fit_loop
    opened = loop.restarted_on_epoch_start  # saved in `on_train_epoch_start`
    moment = restore_loops(trainer)
    loaders = training_loaders(trainer)
    if every := int(cast(Any, trainer).reload_dataloaders_every_n_epochs):
        latest = moment.epoch if moment.begun or opened else max(moment.epoch - 1, 0)
        set_last_reload(trainer, latest // every * every)
    set_epoch(moment.epoch, loaders)

    at_batch = (moment.begun and not moment.all_trained) or (not moment.begun and moment.epoch == 0)
    # Lightning does not load these itself if it considers the epoch finished
    later = take_loader_states(trainer)
    if states := own["loaders"] or later:
        stateful = [loader for loader in loaders if hasattr(loader, "load_state_dict")]
        for loader, state in zip(stateful, states, strict=True):
            if not replays(loader):
                _load_loader(loader, state, at_end=not at_batch)

    texts: list[str] = []
    for loader in filter(replays, loaders):
        texts += map(_OTHER_ORDER.format, private_generators(loader))
    if not set_order(own["order"], loaders):  # a loader that is read below needs its epoch
        texts.append(_OTHER_LOADERS)
    if at_batch and MID_EPOCH.works(trainer):
        ahead = own["ahead"] or []
        count = moment.batches + len(ahead)
        placed = [
            _Placed(loader, count, start, restored=not replays(loader))
            for loader, start in zip_longest(loaders, own["starts"][: len(loaders)])
        ]
        _place_iterator(trainer, placed, count, ahead)
    set_random_state(own["random"], trainer.strategy.root_device)
    set_order(own["order"], loaders)
    sizes = [sizes_of(loader) for loader in loaders]
    if sizes != own.get("sizes", sizes):  # absent from the state of other groups of ranks
        texts.append(
            "the training loaders have other numbers of batches, batch sizes or samplers' seeds"
            f" ({sizes}) than at the save ({own['sizes']}), so the position in the data does not"
            " match"
        )
    # an epoch of which only the end is left is over for the loaders
    batches, epoch = (moment.batches, moment.epoch) if at_batch else (None, moment.epoch + 1)
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
    """Wrapper of a loader that replaces batches that have been trained on by placeholders.

    `start` is the loader's `LoaderOrder.start`.
    """

    def __init__(self, loader: Any, count: int, start: States | None, restored: bool) -> None:
        self._loader, order, length = loader, LoaderOrder.of(loader), length_of(loader)
        self._iterators: list[Iterator[Any]] = []
        while not restored and count > length > 0:  # the loader has started again in the epoch
            self._iterators.append(repeat(None, int(length)))
            count, start = count - int(length), None
        if order is not None and not restored:
            order.start, order.plan = start, (start, count)
        batches = iter(loader)
        for _ in range(0 if order is not None or restored else count):
            next(batches, None)  # without a sampler, batches can only be skipped by reading them
        self._iterators.append(chain(repeat(None, count), batches))

    def __iter__(self) -> Iterator[Any]:
        return self._iterators.pop(0) if self._iterators else iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)


def _place_iterator(
    trainer: pl.Trainer, loaders: Sequence[_Placed], count: int, ahead: Sequence[Any] = ()
) -> None:
    """Give Lightning an iterator that continues after `count` batches, the last `ahead` read."""
    fetcher = data_fetcher(trainer)
    combined = fetcher.combined_loader
    unplaced, combined.flattened = combined.flattened, [*loaders]
    fetcher.iterator = iter(combined)  # `iter(fetcher)` would read ahead
    combined.flattened = unplaced
    fetcher.reset()
    for _ in range(count):
        next(fetcher.iterator, None)  # not of `fetcher`: Lightning has restored its counters
    if fetcher.length is None and hasattr(fetcher, "batches"):
        after = None if ahead else next(fetcher.iterator, None)
        fetcher.batches = [*ahead] if after is None else [after]


def continue_at(trainer: pl.Trainer, step: int) -> None:
    """Start a joining replica's fit, its data and learning-rate schedules at `step`.

    Earlier batches are not read. Call this in `on_train_start`. Schedulers that monitor a metric
    stay as they are. Raise a RuntimeError if the training data has no length or no
    sampler.
    """
    every, total = trainer.accumulate_grad_batches, trainer.num_training_batches
    loaders = training_loaders(trainer)
    if math.isinf(total) or len(training_orders(trainer)) < len(loaders):
        raise RuntimeError(
            "A joining replica can determine its position in the data only if the training"
            " dataloader has a length and a sampler. Use a map-style dataset."
        )
    epoch, steps = divmod(step, -(-int(total) // every))
    batches = steps * every
    start_in_epoch(trainer, step, epoch, batches)
    set_epoch(epoch, loaders)
    if batches:
        placed = [_Placed(loader, batches, None, restored=False) for loader in loaders]
        _place_iterator(trainer, placed, batches)
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
