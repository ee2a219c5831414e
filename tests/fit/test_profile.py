"""A profile of a fit shows the exchanges as named ranges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_commfree import DistributedLionStrategy, StreamingDiLoCoStrategy
from tests.fit.models import Tiny, Voter, loader, quiet_trainer
from tests.world import run_ranks

STEPS = 4


def ranges(rank: int, size: int) -> dict[str, list[str]]:
    """Return our ranges in a profile of a fit, in order."""
    fits: dict[str, Any] = {
        "diloco": (StreamingDiLoCoStrategy(sync_every=2, num_fragments=2), Tiny()),
        "lion": (DistributedLionStrategy(), Voter()),
    }
    found = {}
    for kind, (strategy, module) in fits.items():
        trainer = quiet_trainer(strategy=strategy, devices=size, max_steps=STEPS)
        with torch.profiler.profile() as profile:
            trainer.fit(module, loader(STEPS * 2 * size))
        ours = [e for e in profile.events() if e.name.startswith(("launch ", "land ", "apply "))]
        found[kind] = [event.name for event in sorted(ours, key=lambda e: e.time_range.start)]
    return found


def test_a_profile_shows_launches_and_landings(tmp_path: Path) -> None:
    for found in run_ranks(ranges, 2, tmp_path):
        # after steps 2, 3 and 4; at the end fragment 0 lands, and both are exchanged once more
        steps = ["launch #0", "launch #1", "land #0", "launch #0", "land #1"]
        end = ["land #0", "launch #0", "land #0", "launch #1", "land #1"]
        expected = [name.replace("#", "fragment #") for name in (*steps, *end)]
        assert found["diloco"] == expected
        assert found["lion"] == ["launch vote #0", "land vote #0", "apply vote #0"] * STEPS
