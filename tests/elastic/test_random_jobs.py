"""Jobs whose settings, stores, faults and order of events are drawn from a seed.

After each of them, every replica equals its serial twin, and those that finished have equal
weights. More of them: `python -m tests.elastic.random_jobs 1000 2000`.
"""

from __future__ import annotations

import pytest

from tests.elastic.random_jobs import play_random_job
from tests.elastic.turns import Turns


@pytest.mark.parametrize("seed", [*range(30), 2343, 2603, 3027, 7109])
def test_a_random_job_equals_its_twins(seed: int) -> None:
    with Turns(seed) as turns:
        play_random_job(seed, turns)
