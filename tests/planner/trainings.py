"""A model and a training shared by the tests of the planner."""

from __future__ import annotations

from commfree_planner import Model, Training

MODEL = Model((1_000_000,) * 6, 500_000)
TRAINING = Training(MODEL, step_seconds=0.1)
