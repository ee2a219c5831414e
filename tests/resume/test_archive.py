"""A file is written out of tensors that come one at a time, and read as any other."""

from __future__ import annotations

import gc
import re
import weakref
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_commfree.model import shards
from lightning_commfree.model.shards import has_stand_ins
from lightning_commfree.resume.files import _Sink, read_whole, write_archive, write_whole

WEIGHT = torch.randn(5, 7)
VALUES: dict[str, Tensor] = {
    "fp32": torch.randn(300, 17),
    "bf16": torch.randn(8, 3).bfloat16(),
    "fp8": torch.randn(6).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.randn(3, dtype=torch.complex64),
    "scalar": torch.tensor(4, dtype=torch.int64),
    "empty": torch.empty(0, 4),
    "a view": WEIGHT[1:3].t(),
    "a parameter": torch.nn.Parameter(torch.ones(3)),
    "sparse": torch.eye(3).to_sparse(),
    "empty, int": torch.empty(0, dtype=torch.int64),
}
DENSE = [name for name, tensor in VALUES.items() if tensor.layout == torch.strided]


def stand_in(like: Tensor, fetch: Callable[[], Tensor] | None = None) -> Tensor:
    return shards.stand_in(like.shape, like.dtype, fetch or like.detach)


def same(got: Tensor, expected: Tensor) -> bool:
    if expected.is_sparse:
        got, expected = got.to_dense(), expected.to_dense()
    alike = (got.dtype, got.shape) == (expected.dtype, expected.shape)
    return alike and bytes_of(got) == bytes_of(expected)


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("how", [{}, {"mmap": True}, {"weights_only": False}], ids=str)
def test_torch_reads_what_was_written(how: dict[str, Any], tmp_path: Path) -> None:
    tied = stand_in(VALUES["fp32"])
    state = {
        "here": dict(VALUES),
        "later": {name: stand_in(VALUES[name]) for name in DENSE},
        "tied": [tied, (tied,)],
        "plain": OrderedDict(step=3, name="x"),
        "weight": WEIGHT,
    }
    write_whole(state, tmp_path / "a.ckpt")
    found = torch.load(tmp_path / "a.ckpt", **how)

    for name, tensor in VALUES.items():
        assert same(found["here"][name], tensor), name
        assert name not in DENSE or same(found["later"][name], tensor), name
    one, (other,) = found["tied"]
    assert one.data_ptr() == other.data_ptr()
    assert found["here"]["a view"].untyped_storage().data_ptr() == found["weight"].data_ptr()
    assert found["plain"] == state["plain"]
    assert isinstance(found["here"]["a parameter"], torch.nn.Parameter)
    if "mmap" in how:
        assert all(found["later"][name].data_ptr() % 64 == 0 for name in DENSE)


def test_only_one_tensor_is_there_at_a_time(tmp_path: Path) -> None:
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def fetch(value: float) -> Tensor:
        gc.collect()
        alive.append(sum(one() is not None for one in made))
        tensor = torch.full((1000,), value)
        made.append(weakref.ref(tensor))
        return tensor

    values = [float(i) for i in range(5)]
    state = [stand_in(torch.empty(1000), lambda value=value: fetch(value)) for value in values]
    write_whole(state, tmp_path / "a.ckpt")
    assert alive == [0] * 5
    assert [float(tensor[7]) for tensor in read_whole(tmp_path / "a.ckpt")] == values


def test_every_record_has_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write_whole({"w": stand_in(WEIGHT)}, path)
    written = bytearray(path.read_bytes())
    at = written.index(bytes_of(WEIGHT))
    written[at + 3] ^= 1
    path.write_bytes(written)
    with pytest.raises(RuntimeError, match=re.escape("its record 'archive/data/0' is not as it")):
        read_whole(path)


def test_a_tensor_that_a_hook_has_computed_has_no_values(tmp_path: Path) -> None:
    state = {"w": stand_in(WEIGHT), "half": stand_in(WEIGHT).half()}
    with pytest.raises(RuntimeError, match=r"shape \[5, 7\] in the checkpoint has no values: a"):
        write_whole(state, tmp_path / "a.ckpt")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_keeps_nobody_waiting(tmp_path: Path) -> None:
    """The others put together what they were asked for, and learn then that it was in vain."""
    fetched: list[int] = []

    def fetch(number: int) -> Tensor:
        fetched.append(number)
        return torch.zeros(1000)

    class Full:
        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    state = [stand_in(torch.zeros(1000), lambda number=number: fetch(number)) for number in (0, 1)]
    sink = _Sink()
    with pytest.raises(OSError, match="No space left"):
        sink.write_all(state, Full())  # type: ignore[arg-type]
    assert fetched == [0, 1]
    assert sink.needed > 8000


def test_without_stand_ins_torch_writes() -> None:
    assert not has_stand_ins({"a": [WEIGHT, (1, torch.empty(3, device="meta"))]})
    assert has_stand_ins({"a": [WEIGHT, (1, stand_in(WEIGHT))]})


def test_it_is_an_archive_like_torchs() -> None:
    ours, theirs = BytesIO(), BytesIO()
    write_archive({"w": WEIGHT}, ours)
    torch.save({"w": WEIGHT}, theirs)

    def records(file: BytesIO) -> set[str]:
        return {name.partition("/")[2] for name in zipfile.ZipFile(file).namelist()}

    assert records(theirs) - records(ours) <= {".data/serialization_id"}
    assert records(ours) <= records(theirs) | {".storage_alignment", ".format_version"}
