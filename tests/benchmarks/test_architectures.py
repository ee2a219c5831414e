"""The architectures benchmark: two architectures, one with adapters, and one refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.architectures import __main__ as architectures


@pytest.mark.filterwarnings("ignore")
def test_supported_and_refused_architectures_are_listed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert architectures.main(["--only", "GPT2", "OPT", "--page", str(page)]) == 0
    rows = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    found = {row[0].strip("| "): row[1:] for row in rows}
    for name in ("GPT2", "GPT2 with LoRA"):
        assert found[name][0] == "scheduled"
        assert 0 <= float(found[name][2]) < 1e-6
        assert 0.5 <= float(found[name][3].strip(" |")) < 0.7
    assert found["OPT"][0].startswith("refused: `DominoTPStrategy` found no model in `Module`")
    assert "2 scheduled, 0 sharded by a plan, 1 refused" in page.read_text()
