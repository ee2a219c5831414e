"""What only one rank knows, in files of its own beside a checkpoint.

Replicas differ: each has its own weights, optimizer, random numbers, data position. A Lightning
checkpoint has room for one of them, and to gather all on rank 0 would send more than the training
does. Rank 0's part stands in the checkpoint; every other rank writes its own, and the checkpoint
names the set that belongs to it:

    checkpoints/last.ckpt                                   a Lightning checkpoint, rank 0's part in
    checkpoints/.commfree/last.ckpt/120-5f3a.../rank_3.pt   rank 3's part of the save at step 120

The folder lies beside the checkpoints, so that it goes with them when their folder is copied or
moved, and it can be written wherever they can. It is hidden: `ls`, `glob("*")` and `cp folder/*` do
not meet it, `os.listdir` does. One rank alone makes none.

Whatever dies in between, a checkpoint and its set match: the set of the new save is complete before
the checkpoint is replaced, and the set of the old one is removed after that. Ranks that share no
disk find their own part on their own.

One rank's part of a checkpoint, sealed: whose it is, proof that it is whole, and nothing twice.

A sealed part says its rank, the number of ranks and the save's token, with a digest over these and
its tensors: a file that was swapped, copied to another rank or left by another save is refused by
name.

Replicas share much: global copies that are the checkpoint's weights, outer momenta, on rank 0 the
optimizer. A tensor that stands in the checkpoint already is a *reference* in the part: the key of
the tensor, which is its dtype, shape and digest. So every part is as small as what differs.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from torch import Tensor

from lightning_commfree.comm.digest import digest
from lightning_commfree.model.shards import own
from lightning_commfree.resume.files import FilePath, read_whole, write_whole

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


KEY = "lightning_commfree"  # of a checkpoint's entry
_ENTRY = {"ranks", "token", "place", "algorithm", "fingerprint", "own"}  # "own": rank 0's part
FOLDER = ".commfree"


class RankFiles:
    """The sets of one checkpoint.

    Args:
        checkpoint_path: of the `.ckpt`; local or whatever fsspec opens.
        weights_only: as `Trainer.fit` got it; None stands for True.
    """

    def __init__(self, checkpoint_path: FilePath, weights_only: bool | None = None) -> None:
        self._weights_only = weights_only is not False
        self._path = str(checkpoint_path)
        self._fs, _ = url_to_fs(self._path)
        self._name = f"{FOLDER}/{os.path.basename(self._path)}"
        self._root = self._below(self._path, self._name)

    def place(self, token: str) -> str:
        """Return the place of the set `token` beside a checkpoint."""
        return f"{self._name}/{token}"

    def enter(
        self,
        checkpoint: dict[str, Any],
        owner: Owner,
        algorithm: str,
        fingerprint: Mapping[str, str],
        part: dict[str, Any],
    ) -> set[Key]:
        """Let a checkpoint say of its ranks what a resume asks; rank 0's part goes into it.

        Args:
            checkpoint: gets it, under `KEY`.
            owner: rank 0, in this save.
            algorithm: its name.
            fingerprint: what must be as it is now for an exact resume.
            part: rank 0's, not sealed.

        Returns:
            The tensors to which the parts of the others may refer.
        """
        kinds = kinds_of(part)  # those of the others are the same
        known = {*by_key(checkpoint, kinds)}
        own = seal(owner, part, known)
        checkpoint[KEY] = {
            "ranks": owner.ranks,
            "token": owner.token,
            "place": self.place(owner.token),
            "algorithm": algorithm,
            "fingerprint": fingerprint,
            "own": own,
        }
        return known | by_key(own, kinds).keys()

    def save(self, owner: Owner, part: dict[str, Any], known: Collection[Key]) -> None:
        """Write the part of `owner`, not rank 0, into the set of its save.

        Args:
            owner: whose it is.
            part: tensors, which are not copied, and other values.
            known: as `enter` returned it on rank 0.

        Raises:
            RuntimeError: it cannot be written there.
        """
        sealed, file = seal(owner, part, known), f"{self._root}/{owner.token}/rank_{owner.rank}.pt"
        try:
            write_whole(sealed, file)
        except (OSError, RuntimeError) as error:
            raise RuntimeError(
                f"Rank {owner.rank} cannot write its part of a checkpoint to {file!r}: {error}"
                " Every rank writes beside the checkpoint, on its machine's own disk where none is"
                " shared. The folder must be one that can be written by that path on every machine."
            ) from error

    def find(self, place: str, rank: int) -> str | None:
        """Return the path of a rank's file of the set at `place`, None where there is none.

        A link to a checkpoint finds the set beside what it points to.

        Raises:
            RuntimeError: the place is none of a set's.
        """
        parts = PurePosixPath(place).parts
        if len(parts) != 3 or parts[0] != FOLDER or ".." in parts:
            raise RuntimeError(
                f"The checkpoint {self._path!r} names {place!r} as the place of its ranks' files."
                f" They lie below '{FOLDER}/' beside it and nowhere else, so it was not saved like"
                " this. Nothing was loaded; resume from another checkpoint."
            )
        for path in dict.fromkeys((self._path, os.path.realpath(self._path))):
            file = f"{self._below(path, place)}/rank_{rank}.pt"
            if self._fs.exists(file):
                return file
        return None

    def read(self, file: str) -> Any:
        """Return what a rank's file holds.

        Raises:
            RuntimeError: it cannot be read.
        """
        return read_whole(file, self._weights_only)

    def keep_only(self, token: str, spare: int = 0) -> None:
        """Remove the sets of earlier saves to this path; other ranks may do the same meanwhile.

        Args:
            token: of the latest save.
            spare: so many of the sets before it stay.
        """
        with suppress(OSError):  # no earlier save, or another rank is quicker
            folders = [str(folder).rstrip("/") for folder in self._fs.ls(self._root, detail=False)]
            earlier = [folder for folder in folders if os.path.basename(folder) != token]
            earlier.sort(key=lambda folder: folder.rpartition("-")[2])  # the time, in hexadecimals
            for folder in earlier[: len(earlier) - spare]:
                self._remove(folder)

    def remove(self) -> None:
        """Remove all sets of this checkpoint, and the common folder with the last one."""
        self._remove(self._root)
        with suppress(OSError):  # not empty: another checkpoint's sets, perhaps just being written
            self._fs.rmdir(os.path.dirname(self._root))

    def _remove(self, folder: str) -> None:
        # another rank on this disk may be quicker, which every file system says in its own way;
        # what stays is in nobody's way
        with suppress(OSError):
            self._fs.rm(folder, recursive=True)

    @staticmethod
    def _below(path: str, place: str) -> str:
        return f"{os.path.dirname(path) or '.'}/{place}"


class SavedParts:
    """The parts of all ranks of a checkpoint that was read.

    Args:
        checkpoint_path: where it was read.
        checkpoint: as it was read, before anybody changes it.
        weights_only: as `RankFiles` takes it.

    Attributes:
        entry: what the checkpoint says of its ranks; empty where it says nothing.

    Raises:
        RuntimeError: it says it in another way.
    """

    def __init__(
        self, checkpoint_path: FilePath, checkpoint: Mapping[str, Any], weights_only: bool | None
    ) -> None:
        self.entry: Mapping[str, Any] = checkpoint.get(KEY, {})
        if self.entry and not self.entry.keys() >= _ENTRY:
            raise RuntimeError(
                f"What the checkpoint {str(checkpoint_path)!r} says of its ranks, under {KEY!r},"
                " was written by another version. Load its weights alone (`load_from_checkpoint`),"
                " or resume with the version that has saved it."
            )
        self._files = RankFiles(checkpoint_path, weights_only)
        self._path = str(checkpoint_path)
        self._checkpoint = dict(checkpoint)

    def load(self, rank: int) -> Any:
        """Return what this rank had saved, None where its file is not there.

        Raises:
            RuntimeError: what is there is another rank's, of another save, or damaged.
        """
        owner = Owner(rank, self.entry["ranks"], self.entry["token"])
        if rank == 0:
            name = f"Rank 0's part in {self._path!r}"
            return unseal(self.entry["own"], owner, self._checkpoint, name)
        file = self._files.find(self.entry["place"], rank)
        if file is None:
            return None
        return unseal(self._files.read(file), owner, self._checkpoint, f"The file {file!r}")
