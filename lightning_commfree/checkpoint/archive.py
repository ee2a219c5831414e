"""Writes the file that `torch.save` writes, out of tensors that come when their turn is.

`torch.save` wants all tensors of a state in memory. Here some of them may be stand-ins
(`comm.wholes`), which are fetched, written and dropped one after another. `torch.load` reads the
file as any other, with `mmap=True` and `weights_only=True` too: an archive of one pickle, in which
a tensor's values are the number of a record, and of these records, each with its checksum.
"""

from __future__ import annotations

import pickle
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from io import BytesIO
from typing import IO, Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_commfree.comm.wholes import is_stand_in, values_of

_FOLDER = "archive"  # any name does
_PROTOCOL = 2  # of the pickle, as torch has it
_ALIGNED = 64  # bytes: at a multiple of it the values of a record begin, as torch has it
_HEADER, _LONG_SIZES = 30, 20  # bytes in front of them, beside the record's name and the padding
_PADDING_HEAD = 4


def write_archive(state: Any, file: IO[bytes]) -> None:
    """Write a state; stand-ins are fetched one after another.

    Args:
        state: of tensors and other values. `torch.load` puts all tensors on the CPU.
        file: open for writing; `write`, `tell` and `flush` are called.

    Raises:
        RuntimeError: a tensor on `meta` is no stand-in.
    """
    pickled = BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(state)

    with zipfile.ZipFile(file, "w") as archive:

        def write(name: str, values: Any) -> None:
            record = zipfile.ZipInfo(f"{_FOLDER}/{name}")
            begin = file.tell() + _HEADER + len(record.filename) + _PADDING_HEAD + _LONG_SIZES
            padding = -begin % _ALIGNED
            record.extra = b"FB" + padding.to_bytes(2, "little") + bytes(padding)
            with archive.open(record, "w", force_zip64=True) as opened:
                opened.write(values)

        write("data.pkl", pickled.getvalue())
        write(".format_version", b"1")
        write(".storage_alignment", str(_ALIGNED).encode())
        write("byteorder", sys.byteorder.encode())
        for number, fetch in enumerate(pickler.records):
            write(f"data/{number}", fetch().contiguous().view(-1).view(torch.uint8).numpy())
        write("version", b"3\n")


class _Pickler(pickle.Pickler):
    """Pickles a state with numbers of records in place of values.

    torch pickles a tensor as a call of a function, of whose arguments one is a storage.

    Attributes:
        records: each returns the values of its number.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, _PROTOCOL)
        self.records: list[Callable[[], Tensor]] = []
        self._numbers: dict[Any, int] = {}
        self._stand_ins: dict[int, tuple[Any, Tensor]] = {}  # by the id of an empty storage

    @override
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_meta:
            return NotImplemented
        if not is_stand_in(value):
            raise RuntimeError(
                f"A tensor of shape {list(value.shape)} in the checkpoint has no values: a hook has"
                " computed it from one that is put together only when the file is written. In"
                " `on_save_checkpoint` keep, rename or remove such entries. To compute with whole"
                " ones, which rank 0 then holds all at once, give the Trainer the plugin"
                " `lightning.pytorch.plugins.TorchCheckpointIO()`."
            )
        empty: Any = torch.empty(0, dtype=value.dtype)
        rebuild, (storage, _, _, _, *others) = empty.__reduce_ex__(_PROTOCOL)
        self._stand_ins[id(storage)] = storage, value
        return rebuild, (storage, 0, tuple(value.shape), value.stride(), *others)

    @override
    def persistent_id(self, value: Any) -> Any:
        if not torch.is_storage(value):
            return None
        storage: Any = value
        kind, width = "UntypedStorage", 1
        if isinstance(value, torch.storage.TypedStorage):
            kind = value._pickle_storage_type()  # type: ignore[no-untyped-call]
            width = value.dtype.itemsize
            storage = value._untyped_storage
        _, stand_in = self._stand_ins.get(id(value), (None, None))

        key: Any
        if stand_in is None:
            key, size = (kind, storage.device, storage.data_ptr()), storage.nbytes()
            record = partial(_bytes_of, storage)
        else:
            key, size, record = id(stand_in), stand_in.nbytes, partial(values_of, stand_in)
        if key not in self._numbers:
            self._numbers[key] = len(self.records)
            self.records.append(record)
        return "storage", getattr(torch, kind), str(self._numbers[key]), "cpu", size // width


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu()
