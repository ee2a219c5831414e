from __future__ import annotations

import pytest

from benchmarks.bits import __main__ as bits


def test_the_table_names_every_operation_with_its_ratio_to_the_copy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bits.main(["--numel", "1000", "--rounds", "3"])
    first, header, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("1000 codes, 3 rounds")
    assert header.endswith("ratio to copy")
    ratios = {row.split()[0]: float(row.split()[-1]) for row in rows}
    assert list(ratios) == ["copy", "pack_bits", "unpack_bits", "pack_nibbles", "unpack_nibbles"]
    assert ratios.pop("copy") == 1.0
    assert all(ratio > 0 for ratio in ratios.values())


def test_nothing_to_measure_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bits.main(["--numel", "0"])
    assert "numel=0 and rounds=21 must both be 1 or more" in capsys.readouterr().err
