"""Find what `on_load_checkpoint` hooks change in a checkpoint, and keep these changes.

A resumed fit replaces some entries of the checkpoint with this rank's own states. Hooks run before
that, on entries that contain rank 0's states. What a hook has changed must win over a rank's own
state:

1. Before the hooks: describe the entries by plain values and hashes of tensors (`HookChanges`).
2. After the module's hook, when Lightning loads the model: compare the weights in the checkpoint
   (`compare_weights`). Lightning ignores later changes to them.
3. After the callbacks' hooks: compare the weights in the module (`compare_module`).
4. When the strategy restores: compare the other entries (`compare`), and merge what has changed
   into this rank's own states (`keep`).

Not detected: changes inside objects other than dicts, lists, tuples and tensors, and changes that a
callback's hook makes to the weights of a model that was loaded after it was sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_commfree.comm.digest import digest

_WEIGHTS = ("state_dict", "current_model_state")  # the second is saved by `WeightAveraging`
_ENTRIES = ("optimizer_states", "lr_schedulers", "loops", "callbacks")
_LOADERS = ("loops", "fit_loop", "state_dict", "combined_loader")
_PLAIN = (bool, int, float, complex, str, bytes)
_SHOWN = 3  # maximum number of changes listed in a message
_ABSENT = object()

KeyPath = tuple[Any, ...]  # keys and indices that lead to a value in nested containers


class HookChanges:
    """Changes that hooks have made in a loaded checkpoint.

    Create this object before the hooks run. `precision` is the key of the precision plugin's entry;
    `weights` are the names of the weights that were changed, added or removed.
    """

    def __init__(self, checkpoint: Mapping[str, Any], precision: str) -> None:
        self._checkpoint = checkpoint
        self._entries = (*_ENTRIES, precision)
        self._before = self._describe(*_WEIGHTS, *self._entries)
        self._after: dict[str, Any] = {}
        self._loaded: Any = None  # describes the loaded module
        self.weights: set[str] = set()
        self._paths: list[KeyPath] = []

    def compare_weights(self) -> None:
        """Add the changed weights to `weights`; call this when Lightning loads the model."""
        now = self._describe(*_WEIGHTS)
        for key in _WEIGHTS:
            before, after = self._before.pop(key, {}), now.get(key, {})
            names = {path[0] for path in find_changes(before, after)}
            # a hook may rename weights to match the model, or tie them
            removed = _only_hashes(before, before.keys() - after.keys())
            added = _only_hashes(after, after.keys() - before.keys())
            saved, moved = {*_only_hashes(before, before.keys()).values()}, {*added.values()}
            names -= {name for name, one in added.items() if one in saved}
            names -= {name for name, one in removed.items() if one in moved}
            self.weights |= names
            self._paths += sorted((key, name) for name in names)

    def note_module(self, tensors: Mapping[str, Tensor]) -> None:
        """Note hashes of the module's tensors, right after Lightning has loaded them."""
        if _WEIGHTS[1] not in self._checkpoint:  # else `WeightAveraging` loads them again
            self._loaded = describe(dict(tensors))

    def compare_module(self, tensors: Mapping[str, Tensor]) -> None:
        """Add the tensors that have changed since `note_module` to `weights`."""
        if self._loaded is not None:
            paths = list(find_changes(self._loaded, describe(dict(tensors)), ("module",)))
            self.weights |= {path[-1] for path in paths}
            self._paths += paths
            self._loaded = None

    def compare(self) -> None:
        """Record the changes in the other entries; call this after all hooks."""
        self._after = self._describe(*self._entries)
        self._paths += find_changes(self._before, self._after)

    def keep(self, entry: str, own: Any) -> Any:
        """Return a rank's own version of an entry, with what the hooks have changed in it."""
        before = self._before.get(entry, _ABSENT)
        return merge(own, before, self._after[entry], self._checkpoint[entry])

    def fingerprint(self) -> dict[str, str]:
        """Return the places of all changes, so that ranks can compare them."""
        return {
            f"the change of {_format_path(path)} by `on_load_checkpoint`": "made"
            for path in self._paths
        }

    def _describe(self, *entries: str) -> dict[str, Any]:
        """Return descriptions (`describe`) of entries of the checkpoint as it is now, by key."""
        found = self._checkpoint
        return {key: describe(found[key]) for key in entries if key in found}

    @property
    def loaders(self) -> bool:
        """Whether hooks have changed the saved positions of the loaders."""
        return any(path[: len(_LOADERS)] == _LOADERS for path in self._paths)

    def __str__(self) -> str:
        shown, more = self._paths[:_SHOWN], len(self._paths) - _SHOWN
        return ", ".join(map(_format_path, shown)) + (f" and {more} more" if more > 0 else "")


def _format_path(path: KeyPath) -> str:
    return f"{path[0]}{''.join(f'[{key!r}]' for key in path[1:])}"


class _Hash(NamedTuple):
    """Description of a tensor: its dtype, shape and a hash of its values."""

    dtype: torch.dtype
    shape: torch.Size
    bits: int


def _only_hashes(state: Mapping[str, Any], names: Iterable[str]) -> dict[str, _Hash]:
    """Return those of the entries `names` that describe tensors."""
    return {name: state[name] for name in names if isinstance(state[name], _Hash)}


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers by name; tied tensors have several names."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}


def describe(value: Any) -> Any:
    """Return nested containers with hashes in place of tensors, so that changes can be found."""
    if isinstance(value, dict):
        return {key: describe(child) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(describe, value))
    is_dense = isinstance(value, Tensor) and value.layout == torch.strided
    if is_dense and not (value.is_meta or value.is_quantized):
        return _Hash(value.dtype, value.shape, int(digest(value.contiguous())))
    return value


def find_changes(before: Any, after: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the paths of the smallest parts that differ between two descriptions."""
    if _are_dicts(before, after):
        for key in (*before, *(key for key in after if key not in before)):
            yield from find_changes(before.get(key, _ABSENT), after.get(key, _ABSENT), (*path, key))
    elif _are_lists(before, after):
        for index, pair in enumerate(zip(before, after, strict=True)):
            yield from find_changes(*pair, (*path, index))
    elif not _is_same(before, after):
        yield path


def merge(own: Any, before: Any, after: Any, now: Any) -> Any:
    """Return `own` with the parts replaced in which `now` has been changed.

    `before` and `after` are descriptions of `now` before and after the changes.
    """
    if _are_dicts(before, after) and isinstance(own, dict):
        merged = copy(own)  # keeps the class
        for key in before.keys() - after.keys():
            merged.pop(key, None)
        for key, value in now.items():
            if key in own and key in before:
                merged[key] = merge(own[key], before[key], after[key], value)
            elif next(find_changes(before.get(key, _ABSENT), after[key]), None) is not None:
                merged[key] = value
        return merged
    if _are_lists(before, after) and type(own) is list and len(own) == len(now):
        return [merge(*parts) for parts in zip(own, before, after, now, strict=True)]
    return own if next(find_changes(before, after), None) is None else now


def _are_dicts(before: Any, after: Any) -> bool:
    """Return whether two descriptions are dicts to compare key by key; an emptied one is not."""
    both = isinstance(before, dict) and isinstance(after, dict)
    return both and bool(after or not before)


def _are_lists(before: Any, after: Any) -> bool:
    """Return whether two descriptions are lists of equal length, to compare item by item."""
    return type(before) is type(after) is list and len(before) == len(after)


def _is_same(before: Any, after: Any) -> bool:
    """Return whether two descriptions are the same object, or equal plain values or hashes."""
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, tuple) and not isinstance(before, _Hash):
        return len(before) == len(after) and all(map(_is_same, before, after))
    return isinstance(before, (*_PLAIN, _Hash)) and bool(before == after)
