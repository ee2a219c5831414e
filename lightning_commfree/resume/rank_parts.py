"""One rank's part of a checkpoint: whose it is, proof that it is whole, and nothing twice.

A part says its rank, the number of ranks and the save's token, with a digest over these and its
tensors: a file that was swapped, copied to another rank or left by another save is refused by name.

Replicas share much: global copies that are the checkpoint's weights, outer momenta, on rank 0 the
optimizer. What is equal to a tensor of the checkpoint to the last bit, told by digests, stands in
the part as a reference to it. So every part is as small as what differs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_commfree.comm.digest import digest

_REFERENCE = "in the checkpoint"  # the key of a dictionary that stands for a tensor
_LEAST_BYTES = 1024  # of a tensor that is worth a reference

Path = tuple[Any, ...]  # the keys that lead to a value in nested dictionaries, lists and tuples


class Owner(NamedTuple):
    """Whose part it is, of which save."""

    rank: int
    ranks: int
    token: str


class Known(NamedTuple):
    """A tensor of the checkpoint."""

    path: Path
    digest: int


def known_tensors(state: Any, at: Path = ()) -> dict[tuple[int, str, tuple[int, ...]], Known]:
    """Return a checkpoint's tensors by digest, dtype and shape; plain values, to be broadcast.

    Args:
        state: of the checkpoint, or what stands in it.
        at: where it stands.
    """
    tensors = {path: t for path, t in tensors_of(state).items() if t.nbytes >= _LEAST_BYTES}
    digests = _digests(tensors)
    return {
        _key(tensor, digests[path]): Known((*at, *path), digests[path])
        for path, tensor in tensors.items()
    }


def seal(
    owner: Owner, state: Any, known: Mapping[tuple[int, str, tuple[int, ...]], Known]
) -> dict[str, Any]:
    """Return a rank's part of a checkpoint.

    Args:
        owner: whose it is.
        state: tensors, which are not copied, and other values.
        known: tensors of the checkpoint, which need not stand in the part again.
    """
    digests = _digests(tensors_of(state))

    def stored(path: Path, tensor: Tensor) -> Any:
        found = known.get(_key(tensor, digests[path]))
        return tensor if found is None else {_REFERENCE: list(found.path), "digest": found.digest}

    part = {**owner._asdict(), "state": _mapped(state, stored)}
    return {**part, "digest": _digest_of(part, digests)}


def unseal(part: Any, owner: Owner, checkpoint: Mapping[Path, Tensor], name: str) -> Any:
    """Return the state that `seal` got, with the checkpoint's tensors where it refers to them.

    Args:
        part: as it was read.
        owner: who asks for it.
        checkpoint: the tensors in it; where one is referred to again it is copied.
        name: of the file, for the error.

    Raises:
        RuntimeError: it is another rank's or another save's, or not as it was written.
    """
    if not isinstance(part, dict) or not {*Owner._fields, "digest", "state"} <= part.keys():
        raise _refused(name, "it is no rank's part of a checkpoint")
    found = Owner(*(part[field] for field in Owner._fields))
    if found != owner:
        raise _refused(name, f"it is {_named(found)}, and {_named(owner)} is needed")
    if _digest_of(part, _digests(tensors_of(part["state"]))) != part["digest"]:
        raise _refused(name, "its tensors are not those that were written")
    wanted = {tuple(r[_REFERENCE]): r["digest"] for r in _references(part["state"])}
    shared = {path: checkpoint[path] for path in wanted if path in checkpoint}
    if _digests(shared) != wanted:
        raise _refused(name, "the checkpoint's own tensors are not those that it was saved with")
    return _filled(part["state"], shared, set())


def _filled(state: Any, shared: Mapping[Path, Tensor], taken: set[Path]) -> Any:
    if _is_reference(state):
        path = tuple(state[_REFERENCE])
        again = path in taken  # two that were equal at the save, and may go apart from here on
        taken.add(path)
        return shared[path].clone() if again else shared[path]
    return _rebuilt(state, lambda _, child: _filled(child, shared, taken))


def _references(state: Any) -> Iterator[dict[str, Any]]:
    if _is_reference(state):
        yield state
    else:
        for _, child in _children(state):
            yield from _references(child)


def _is_reference(value: Any) -> bool:
    return type(value) is dict and _REFERENCE in value


def _refused(name: str, why: str) -> RuntimeError:
    return RuntimeError(
        f"{name} is refused: {why}. Nothing was loaded. Put the files back as they were saved, or"
        " resume from another checkpoint."
    )


def _named(owner: Owner) -> str:
    return f"the part of rank {owner.rank} of {owner.ranks} in save {owner.token!r}"


# Nested states


def tensors_of(state: Any) -> dict[Path, Tensor]:
    """Return the tensors in nested dictionaries, lists and tuples by the keys that lead to them."""
    return dict(_tensors(state, ()))


def _tensors(value: Any, at: Path) -> Iterator[tuple[Path, Tensor]]:
    if _has_bits(value):
        yield at, value
    for key, child in _children(value):
        yield from _tensors(child, (*at, key))


def copied(state: Any) -> Any:
    """Return nested dictionaries, lists and tuples with copies of their tensors in host memory."""
    return _mapped(state, lambda _, tensor: tensor.detach().to("cpu", copy=True))


def _mapped(value: Any, of_tensor: Callable[[Path, Tensor], Any], at: Path = ()) -> Any:
    if _has_bits(value):
        return of_tensor(at, value)
    return _rebuilt(value, lambda key, child: _mapped(child, of_tensor, (*at, key)))


def _rebuilt(value: Any, of_child: Callable[[Any, Any], Any]) -> Any:
    """Return a plain container with other children, and anything else as it is."""
    children = {key: of_child(key, child) for key, child in _children(value)}
    if not children:
        return value
    return type(value)(children if isinstance(value, dict) else children.values())


def _children(value: Any) -> list[tuple[Any, Any]]:
    """Return keys and values of a plain container, none of anything else."""
    if type(value) in (dict, OrderedDict):
        return list(value.items())
    return list(enumerate(value)) if type(value) in (list, tuple) else []


def _has_bits(value: Any) -> bool:
    """Return whether it is a tensor that can be hashed; others stay where they stand."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
        return False
    return not (value.is_quantized or value.is_conj() or value.is_neg())


# Digests


def _key(tensor: Tensor, digest: int) -> tuple[int, str, tuple[int, ...]]:
    return digest, str(tensor.dtype), tuple(tensor.shape)


def _digests(tensors: Mapping[Path, Tensor]) -> dict[Path, int]:
    found = {path: digest(tensor.contiguous()) for path, tensor in tensors.items()}
    return {path: int(value) for path, value in found.items()}


def _digest_of(part: Mapping[str, Any], digests: Mapping[Path, int]) -> str:
    """Return the digest of a part's header, tensors and references.

    Args:
        part: with its state.
        digests: of the tensors of the state, among others.
    """
    header = [part[field] for field in Owner._fields]
    told = [(*path, *_key(t, digests[path])) for path, t in tensors_of(part["state"]).items()]
    references = [(r[_REFERENCE], r["digest"]) for r in _references(part["state"])]
    return blake2b(repr([header, told, references]).encode(), digest_size=16).hexdigest()
