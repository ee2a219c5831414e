"""The parts of a training loader that determine which data it yields, and in which order.

=========================================  ========================================================
part                                       what a resume does with it
=========================================  ========================================================
a `torch.Generator` of the loader, its     restores its state
samplers or its data set
an integer `epoch` of these                restores it, with `set_epoch` if there is one
a random number generator of Python or     names its owner (`private_generators`)
numpy, or inside of other objects
random numbers drawn in worker processes   names the data set (`unknown_parts`): batches that have
                                           been trained on are not read again
a number that a data set changes           names it (`changed_numbers`), for the same reason
other state of classes that are neither    names the class (`unknown_parts`): nobody but its author
torch's nor Lightning's                    knows whether it is complete
=========================================  ========================================================
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

# packages whose classes have no state beyond what a resume restores
_KNOWN = {
    "builtins",
    "lightning",
    "lightning_commfree",
    "lightning_fabric",
    "pytorch_lightning",
    "torch",
    "torchdata",
}
_PARTS = ("sampler", "batch_sampler", "dataset")
_LOOKED_AT, _MOST_VALUES = 50, 10_000  # in a container, and in all, when generators are searched

OrderState = list[Any]  # of one loader: its epochs (int), and the states of its generators (Tensor)


def is_known(part: object) -> bool:
    """Return whether a function, or an object's class, is of torch, Lightning or this library."""
    kind = part if isinstance(part, FunctionType) else type(part)
    return kind.__module__.partition(".")[0] in _KNOWN


def name_of(part: object) -> str:
    """Return a function's name, or an object's class name, in backticks, for messages."""
    kind = part if isinstance(part, FunctionType) else type(part)
    return f"`{kind.__name__}`"


def replays(loader: object) -> bool:
    """Return whether a resume skips a loader's batches instead of loading its state.

    This includes torchdata's `StatefulDataLoader`, unless its data set or a sampler has a state of
    its own. Its state alone is not enough: it contains neither the order that Lightning's
    distributed sampler has drawn nor random numbers, and at the end of an epoch it yields nothing.
    """
    if not hasattr(loader, "load_state_dict"):
        return True
    has_state = any(hasattr(part, "load_state_dict") for part in parts_of(loader))
    streams = isinstance(getattr(loader, "dataset", None), IterableDataset)
    return isinstance(loader, DataLoader) and is_known(loader) and not (has_state or streams)


def parts_of(loader: object) -> list[Any]:
    """Return a loader's samplers and data set, and those that they wrap."""
    parts: list[Any] = [getattr(loader, name, None) for name in _PARTS]
    for part in parts:  # the list grows: wrapped parts are appended
        inside = getattr(part, "__dict__", {})
        wrapped = [
            value
            for name, value in inside.items()
            # Lightning's distributed sampler keeps the user's sampler in its `dataset`
            if isinstance(value, Sampler | Dataset) or name.lstrip("_") in _PARTS
        ]
        several = inside.get("datasets")  # of a `ConcatDataset`
        wrapped += several if isinstance(several, list) else []
        for new in wrapped:
            if not any(new is old for old in parts):
                parts.append(new)
    return [part for part in parts if part is not None]


def has_sampler(loader: object) -> bool:
    """Return whether a loader draws an epoch's order with a sampler, from a map-style data set."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def private_generators(loader: object) -> list[str]:
    """Return the names of a loader and its parts that have a generator which is not restored.

    These are generators of Python or numpy, and those inside of other objects, such as the
    transforms of a data set. The result omits parts with `set_epoch`, which derive their order from
    the epoch, and what only worker processes use.
    """
    parts, collate = parts_of(loader), getattr(loader, "collate_fn", None)
    if getattr(loader, "num_workers", 0):
        parts = [part for part in parts if part is not getattr(loader, "dataset", None)]
    elif collate is not None:
        parts.append(collate)
    kept = [one for one in _keepers(loader) if isinstance(one, torch.Generator)]

    def is_private(value: object) -> bool:
        """Return whether a value is a random number generator that is not restored."""
        is_numpys = type(value).__module__.startswith("numpy.random") and hasattr(value, "shuffle")
        is_torchs = isinstance(value, torch.Generator) and not any(value is one for one in kept)
        return isinstance(value, random.Random) or is_numpys or is_torchs

    def has_private(part: object) -> bool:
        """Return whether such a generator is anywhere inside a part."""
        values = _values_in(part, [one for one in parts if one is not part])
        return any(map(is_private, islice(values, _MOST_VALUES)))

    owners = [*filter(has_private, parts)]
    if any(map(is_private, getattr(loader, "__dict__", {}).values())):
        owners.insert(0, loader)
    names = [getattr(one, "__name__", type(one).__name__) for one in owners]
    hidden = [n for one, n in zip(owners, names, strict=True) if not hasattr(one, "set_epoch")]
    return list(dict.fromkeys(hidden))


def _values_in(owner: object, others: Sequence[object], depth: int = 4) -> Iterator[Any]:
    """Yield an object's attributes, items and closure, and theirs, except those of `others`."""
    if depth == 0 or any(owner is one for one in others):
        return
    if isinstance(owner, Tensor | str | bytes | type | ModuleType | torch.Generator):
        return
    if isinstance(owner, dict):
        inside = [*islice(owner.values(), _LOOKED_AT)]
    elif isinstance(owner, list | tuple | set):
        inside = [*islice(owner, _LOOKED_AT)]
    else:
        inside = [*getattr(owner, "__dict__", {}).values()]
        for cell in getattr(owner, "__closure__", None) or ():
            with suppress(ValueError):  # an empty cell
                inside.append(cell.cell_contents)
        inside += [getattr(owner, name, None) for name in ("func", "args", "keywords", "__self__")]
    for value in inside:
        yield value
        yield from _values_in(value, others, depth - 1)


def sizes_of(loader: object) -> list[int]:
    """Return a loader's number of batches, batch size and sampler's seed; -1 where unknown."""
    length = length_of(loader)
    # Lightning's sampler for several ranks takes its seed from `seed_everything`
    numbers = getattr(loader, "batch_size", None), _seed_of(getattr(loader, "sampler", None))
    known = [number if isinstance(number, int) else -1 for number in numbers]
    return [-1 if length == float("inf") else int(length), *known]


def _seed_of(sampler: object) -> object:
    """Return the seed of a sampler that shuffles, else None."""
    return getattr(sampler, "seed", None) if getattr(sampler, "shuffle", False) else None


def order_state(loader: object) -> OrderState:
    """Return the states of a loader's generators and its epochs."""
    return [
        one.get_state() if isinstance(one, torch.Generator) else int(one.epoch)
        for one in _keepers(loader)
    ]


def set_order(states: Sequence[OrderState], loaders: Sequence[object]) -> bool:
    """Restore the states that `order_state` returned for the loaders.

    Restore nothing, and return False, if the loaders no longer have the same parts.
    """
    keepers = [_keepers(loader) for loader in loaders]
    if [*map(_are_generators, keepers)] != [
        [isinstance(one, Tensor) for one in some] for some in states
    ]:
        return False
    for some, its_states in zip(keepers, states, strict=True):
        for one, state in zip(some, its_states, strict=True):
            if isinstance(one, torch.Generator):
                one.set_state(state)
            elif one.epoch != state:
                if hasattr(one, "set_epoch"):
                    one.set_epoch(state)
                if "epoch" in getattr(one, "__dict__", {}):
                    one.epoch = state
    return True


def _are_generators(keepers: Iterable[object]) -> list[bool]:
    """Return, for each object, whether it is a `torch.Generator`."""
    return [isinstance(one, torch.Generator) for one in keepers]


def _keepers(loader: object) -> list[Any]:
    """Return a loader's parts with an epoch, then its generators, without duplicates."""
    parts = [*([loader] if replays(loader) else []), *parts_of(loader)]
    epochs = [
        part
        for part in parts
        if type(getattr(part, "epoch", None)) is int
        and (hasattr(part, "set_epoch") or "epoch" in getattr(part, "__dict__", {}))
    ]
    values = [getattr(loader, "generator", None)]
    values += [value for part in parts for value in getattr(part, "__dict__", {}).values()]
    # `set_epoch` may seed a generator, so generators come last
    return [*epochs, *dict.fromkeys(one for one in values if isinstance(one, torch.Generator))]


def numbers_in_data(loader: object) -> dict[str, float]:
    """Return the numbers among the attributes of the user's own data sets, such as counts of reads.

    Keys are texts for messages, as in "`Type.name`".
    """
    return {
        f"`{type(part).__name__}.{name}`": value
        for part in parts_of(loader)
        if hasattr(part, "__getitem__") and not is_known(part)
        for name, value in getattr(part, "__dict__", {}).items()
        if type(value) in (int, float) and name != "epoch"  # an epoch is restored
    }


def changed_numbers(loader: object, before: Mapping[str, float]) -> list[str]:
    """Return messages about numbers in a loader's data that were others `before`."""
    return [
        f"{name} changes as rows are read, and a resume skips rows without reading them"
        for name, value in numbers_in_data(loader).items()
        if value != before.get(name)
    ]


def unknown_parts(loader: object, batches: int | None, epoch: int) -> list[str]:
    """Return descriptions of what a resume cannot know about a loader.

    `batches` of this epoch have been trained on (None if the fit resumes at its end), and `epoch`
    epochs are over.
    """
    found = [] if is_known(loader) and replays(loader) else [f"loader {name_of(loader)}"]
    in_workers = [getattr(loader, "collate_fn", None)]
    for part in parts_of(loader):
        if is_known(part):
            continue
        if not hasattr(part, "__getitem__"):
            found.append(f"sampler {name_of(part)}")
            continue
        in_workers.append(part)
        if isinstance(part, IterableDataset) or any(
            hasattr(part, name) for name in ("set_epoch", "epoch", "load_state_dict")
        ):
            found.append(f"data set {name_of(part)}")
    if getattr(loader, "num_workers", 0):
        if batches is not None:
            found += [
                f"random numbers that {name_of(part)} draws in worker processes"
                for part in in_workers
                if not is_known(part)
            ]
        if getattr(loader, "persistent_workers", False) and epoch:
            found.append("random numbers and other state of persistent workers")
        if not getattr(loader, "in_order", True):
            found.append("the order of a loader with `in_order=False`")
    if batches is not None and batches > length_of(loader):
        found.append(f"the order of {name_of(loader)}, which started again within the epoch")
    return found


def length_of(loader: Any) -> float:
    """Return the number of a loader's batches, or infinity if it is unknown."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return float("inf")
