from __future__ import annotations

from benchmarks.common.timing import take_turns


def test_a_ratio_is_median_over_the_first_ones_and_the_first_round_does_not_count() -> None:
    """The clock is played: an operation returns the seconds that it takes, round by round."""
    played = {"first": iter([90.0, 2.0, 1.0, 4.0]), "slow": iter([0.0, 6.0, 5.0, 70.0])}
    operations = {name: seconds.__next__ for name, seconds in played.items()}
    timings = take_turns(operations, rounds=3, seconds_of=lambda operation: operation())
    assert timings == {"first": (2.0, 1.0), "slow": (6.0, 3.0)}
