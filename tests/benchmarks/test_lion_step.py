"""The benchmark of Distributed Lion's step: a toy run."""

from __future__ import annotations

from pathlib import Path

from benchmarks.lion_step import __main__ as lion
from benchmarks.lion_step import operations as ops


def test_the_page_has_every_operation(tmp_path: Path) -> None:
    page = tmp_path / "lion.md"
    lion.main(["--rounds", "1", "--models", "toy", "--page", str(page)])
    text = page.read_text()
    assert "- command: `python -m benchmarks.lion_step --rounds 1" in text
    for name in (ops.ADAMW, ops.ADAMW_FUSED, ops.LION, ops.CAST, ops.APPLY, ops.WORKER):
        assert f"| {name} | " in text
    assert "takes at most AdamW's time: " in text
