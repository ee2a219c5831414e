"""One rank's part of a checkpoint, sealed: whose it is, proof that it is whole, and nothing twice.

A sealed part says its rank, the number of ranks and the save's token, with a digest over these and
its tensors: a file that was swapped, copied to another rank or left by another save is refused by
name.

Replicas share much: global copies that are the checkpoint's weights, outer momenta, on rank 0 the
optimizer. A tensor that stands in the checkpoint already is a *reference* in the part: the key of
the tensor, which is its dtype, shape and digest. So every part is as small as what differs.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_commfree.comm.digest import digest
from lightning_commfree.comm.parts import own

_REFERENCE = "in the checkpoint"  # the key of a dictionary that stands for a tensor

Kind = tuple[str, tuple[int, ...]]  # of a tensor: dtype, shape
Key = tuple[str, tuple[int, ...], int]  # and digest


class Owner(NamedTuple):
    """Whose part it is, of which save."""

    rank: int
    ranks: int
    token: str


def seal(owner: Owner, part: Any, known: Collection[Key]) -> dict[str, Any]:
    """Return a rank's part, sealed.

    Args:
        owner: whose it is.
        part: tensors, which are not copied, and other values.
        known: tensors of the checkpoint, which need not stand in the part again.
    """
    keys = []

    def stored(tensor: Tensor) -> Any:
        key = _key(tensor)
        keys.append(key)
        return {_REFERENCE: key} if key in known else tensor

    state = _mapped(part, stored)
    return {**owner._asdict(), "state": state, "digest": _digest_of(owner, keys)}


def unseal(sealed: Any, owner: Owner, checkpoint: Any, name: str) -> Any:
    """Return the part that `seal` got.

    Args:
        sealed: as it was read.
        owner: who asks for it.
        checkpoint: has the tensors to which the part refers. One to which it refers twice is copied
            then: what was equal at the save may go apart from here on.
        name: of the file, for the error.

    Raises:
        RuntimeError: it is another rank's or another save's, or not as it was written.
    """
    if not isinstance(sealed, dict) or not {*Owner._fields, "digest", "state"} <= sealed.keys():
        raise _refused(name, "it is no rank's part of a checkpoint")
    found = Owner(*(sealed[field] for field in Owner._fields))
    if found != owner:
        raise _refused(name, f"it is {_named(found)}, and {_named(owner)} is needed")

    stands_for: list[Tensor | Key] = []
    _mapped(sealed["state"], stands_for.append, stands_for.append)
    keys = [_key(one) if isinstance(one, Tensor) else one for one in stands_for]
    if _digest_of(owner, keys) != sealed["digest"]:
        raise _refused(name, "its tensors are not those that were written")

    wanted = [one for one in stands_for if not isinstance(one, Tensor)]
    tensors = by_key(checkpoint, {key[:2] for key in wanted})
    if not tensors.keys() >= set(wanted):
        raise _refused(name, "the checkpoint's own tensors are not those that it was saved with")
    taken: set[Key] = set()

    def referred(key: Key) -> Tensor:
        again = key in taken
        taken.add(key)
        return tensors[key].clone() if again else tensors[key]

    return _mapped(sealed["state"], lambda tensor: tensor, referred)


def by_key(state: Any, kinds: Collection[Kind]) -> dict[Key, Tensor]:
    """Return the tensors of some kinds in nested dictionaries, lists and tuples.

    Others are not read, which takes as long as it takes to read a model.
    """
    tensors: list[Tensor] = []
    _mapped(state, tensors.append)
    return {_key(tensor): tensor for tensor in tensors if _kind(tensor) in kinds}


def kinds_of(state: Any) -> set[Kind]:
    """Return the kinds of the tensors in nested dictionaries, lists and tuples."""
    kinds: set[Kind] = set()
    _mapped(state, lambda tensor: kinds.add(_kind(tensor)))
    return kinds


def copied(state: Any, only: Iterable[Tensor] | None = None) -> Any:
    """Return nested dictionaries, lists and tuples with copies of their tensors in host memory.

    Args:
        state: of tensors and other values.
        only: copy what shares memory with one of these, and keep the others; None: copy all.
    """
    shared = None if only is None else {one.untyped_storage().data_ptr() for one in only}

    def copy(tensor: Tensor) -> Tensor:
        if shared is not None and tensor.untyped_storage().data_ptr() not in shared:
            return tensor
        return tensor.detach().to("cpu", copy=True)

    return _mapped(state, copy)


def plain(state: Any) -> Any:
    """Return a state of plain values and tensors, None for one that holds anything else.

    What lies in a rank's file is read without running code from it.
    """
    return state if _is_plain(state) else None


def _is_plain(state: Any) -> bool:
    if type(state) in (dict, Counter, OrderedDict):
        return all(map(_is_plain, (*state.keys(), *state.values())))
    if type(state) in (list, tuple, set, torch.Size):
        return all(map(_is_plain, state))
    return state is None or type(state) in (bool, int, float, complex, str, bytes, torch.Tensor)


def _mapped(
    value: Any, of_tensor: Callable[[Tensor], Any], of_reference: Callable[[Key], Any] | None = None
) -> Any:
    """Return plain containers with other values in place of tensors, in the order of a walk.

    References stay as they are without `of_reference`.
    """
    if _has_bits(value):
        return of_tensor(own(value))
    if type(value) in (dict, OrderedDict):
        if of_reference is not None and _REFERENCE in value:
            return of_reference(value[_REFERENCE])
        return type(value)(
            (key, _mapped(child, of_tensor, of_reference)) for key, child in value.items()
        )
    if type(value) in (list, tuple):
        return type(value)(_mapped(child, of_tensor, of_reference) for child in value)
    return value


def _has_bits(value: Any) -> bool:
    """Return whether it is a tensor that can be hashed; others stay where they stand."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
        return False
    return not (value.is_quantized or value.is_conj() or value.is_neg())


def _kind(tensor: Tensor) -> Kind:
    return str(tensor.dtype), tuple(tensor.shape)


def _key(tensor: Tensor) -> Key:
    return *_kind(tensor), int(digest(tensor.contiguous()))


def _digest_of(owner: Owner, keys: Collection[Key]) -> str:
    return blake2b(repr([tuple(owner), *keys]).encode(), digest_size=16).hexdigest()


def _refused(name: str, why: str) -> RuntimeError:
    return RuntimeError(
        f"{name} is refused: {why}. Nothing was loaded. Put the files back as they were saved, or"
        " resume from another checkpoint."
    )


def _named(owner: Owner) -> str:
    return f"the part of rank {owner.rank} of {owner.ranks} in save {owner.token!r}"
