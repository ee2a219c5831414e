"""The benchmark of a joiner's optimizer: its arithmetic, and short runs on a toy corpus."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.common.pretraining import composed
from benchmarks.elastic_joiner import __main__ as joiner


def test_a_joiner_changes_the_run_and_the_donors_state_changes_it_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joiner, "STRATEGY", {"sync_every": 4, "overlap_steps": 1})
    words = ["data=synthetic", "data.corpus.train_characters=40000", "trainer.max_steps=14"]
    words += ["data.corpus.validation_characters=4000", f"cache_dir={tmp_path}"]
    config = composed(["experiment=demo", "trainer.devices=2", *joiner.SETTINGS, *words])
    none, fresh, donor = (
        joiner.loss_of(config, joins, state)
        for joins, state in ([[], "fresh"], [[9], "fresh"], [[9], "donor"])
    )
    assert len({none, fresh, donor}) == 3
    assert none == joiner.loss_of(config, [], "donor")


def test_the_cost_is_that_of_the_same_seed() -> None:
    losses = {"undisturbed": [2.0, 4.0]}
    for joins in joiner.JOINS:
        losses |= {f"{joins}, fresh": [2.02, 4.04], f"{joins}, donor": [2.02, 4.0]}
    page, checks = joiner.page(losses, [])
    assert "| one, fresh | 2.0200 | 4.0400 | +1.00 ± 0.00 % |" in page
    assert "costs +0.50 ± 0.50 % of the loss, compared with the donor's" in checks[0]
