"""A model and a job that the tests of the planner share."""

from __future__ import annotations

from commfree_planner import Job, Model

MODEL = Model((1_000_000,) * 6, 500_000)
JOB = Job(MODEL, step_seconds=0.1)
