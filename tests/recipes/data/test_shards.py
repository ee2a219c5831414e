from __future__ import annotations

import numpy as np
import pytest

from recipes.data.shards import HEADER_BYTES, TokenShards
from recipes.data.tokenizer import byte_tokenizer


@pytest.fixture
def make_data(tmp_path):
    np.arange(9, dtype="<u2").tofile(tmp_path / "train_1.bin")
    np.arange(100, 114, dtype="<u2").tofile(tmp_path / "train_2.bin")
    np.arange(200, 209, dtype="<u2").tofile(tmp_path / "val_1.bin")

    def make(train="train_*.bin", validation="val_*.bin", **kwargs):
        settings = {"block_size": 4, "batch_size": 1, **kwargs}
        return TokenShards(
            f"{tmp_path}/{train}",
            f"{tmp_path}/{validation}",
            byte_tokenizer(),
            str(tmp_path / "cache"),
            **settings,
        )

    return make


def test_blocks_follow_file_by_file(make_data) -> None:
    data = make_data()
    data.prepare_data()
    data.setup("fit")
    rows = [row.tolist() for row in data.blocks("train")]
    starts = [0, 4, 100, 104, 108]  # what is left of a file fills no block with the next one's
    assert rows == [list(range(start, start + 5)) for start in starts]
    assert data.describe() == "23 training, 9 validation tokens"
    assert {tuple(row.tolist()) for batch in data.train_dataloader() for row in batch} == {
        tuple(row) for row in rows
    }


@pytest.mark.parametrize(("magic", "dtype"), [(20240520, "<u2"), (20240801, "<u4")])
def test_llm_cs_header_is_no_token(make_data, tmp_path, magic, dtype) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, 9
    assert header.nbytes == HEADER_BYTES
    tokens = np.arange(9, dtype=dtype)
    (tmp_path / "with.bin").write_bytes(header.tobytes() + tokens.tobytes())
    [part] = make_data(train="with.bin").blocks("train").parts
    assert part.tokens.tolist() == list(range(9))


def test_four_bytes_a_token(make_data, tmp_path) -> None:
    np.arange(9, dtype="<u4").tofile(tmp_path / "wide.bin")
    [part] = make_data(train="wide.bin", dtype="uint32").blocks("train").parts
    assert part.tokens.tolist() == list(range(9))


def test_the_largest_id_is_looked_for_in_every_file_once(make_data, tmp_path) -> None:
    np.array([1, 2, 257, 3, 4], "<u2").tofile(tmp_path / "train_3.bin")
    data = make_data()
    with pytest.raises(ValueError, match=r"train_3.bin' has the token 257, .* ids 0 to 256"):
        data.prepare_data()
    (tmp_path / "train_3.bin").unlink()
    make_data().prepare_data()
    kept = sorted((tmp_path / "cache").glob("largest-id-*.txt"))
    times = [file.stat().st_mtime_ns for file in kept]
    make_data().prepare_data()
    assert [file.stat().st_mtime_ns for file in kept] == times


def test_files_that_cannot_be(make_data, tmp_path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"123")
    with pytest.raises(
        ValueError, match=r"odd.bin' has 3 bytes, which is not a whole number of uint"
    ):
        make_data(train="odd.bin").prepare_data()
    with pytest.raises(FileNotFoundError, match=r"data.train: '.*/no.bin' matches no file"):
        make_data(train="no.bin")
    with pytest.raises(ValueError, match=r"share 1 file, .* \(`data.train`, `data.valid"):
        make_data(train="*.bin")
    with pytest.raises(ValueError, match=r"data.dtype='int8' must be one of uint16, uint32"):
        make_data(dtype="int8")
    (tmp_path / "empty.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="The train split is empty"):
        make_data(train="empty.bin").setup("fit")
