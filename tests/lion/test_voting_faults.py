"""NaN, Inf and parameters that have drifted apart: all workers learn of it, and nothing is lost."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import pytest
import torch

from lightning_commfree.lion import LionSettings
from tests.lion import training
from tests.lion.threads import in_threads
from tests.lion.training import BUCKETS, SHAPES, Gradients, Worker, play

SICK_AT = 3


@pytest.fixture(autouse=True)
def _several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    training.small_buckets(monkeypatch)


class Faulty(NamedTuple):
    """Gradients that are not finite at one step: worker -> names of parameters."""

    sick: dict[int, list[str]]

    def __call__(self, step: int, worker: int) -> Gradients:
        values = training.gradients(step, worker)
        for name in self.sick.get(worker, []) if step == SICK_AT else []:
            value = torch.ones(SHAPES[name]) if values[name] is None else values[name].contiguous()
            value.view(-1)[-1] = (math.nan, math.inf, -math.inf)[worker % 3]
            values[name] = value
        return values

    def left_out(self, step: int, worker: int) -> Gradients:
        """What a twin is to see: nothing of a bucket in which something is not finite."""
        values = training.gradients(step, worker)
        for names in BUCKETS if step == SICK_AT else []:
            if set(names) & set(self.sick.get(worker, [])):
                values.update(dict.fromkeys(names))
        return values


@pytest.mark.parametrize(
    ("sick", "named", "more"),
    [
        ({2: ["conv"]}, "'conv' on rank 2", ""),
        ({0: ["embed"], 1: ["head"]}, "'head' on rank 1", ""),  # the first bucket that is sick
        ({2: ["conv"], 0: ["bias", "conv"]}, "'bias' on rank 0", r" \(and 2 more\)"),
        ({0: ["scale"], 1: ["scale"], 2: ["scale"]}, "'scale' on rank 0", r" \(and 2 more\)"),
    ],
)
def test_all_stop_with_rank_and_name_and_nothing_is_changed(
    sick: dict[int, list[str]], named: str, more: str
) -> None:
    """And then go on as if that step had not been."""
    data = Faulty(sick)

    def worker(channel: Any) -> tuple[str, dict[str, Any]]:
        one = Worker(channel, LionSettings())
        for step in range(SICK_AT):
            before = one.step(data(step, channel.rank))
        momenta = one.momenta()
        pattern = rf"gradient of {named} contains NaN or Inf{more}, before step {SICK_AT + 1}\. All"
        with pytest.raises(RuntimeError, match=pattern) as error:
            one.step(data(SICK_AT, channel.rank))
        training.assert_same(training.snapshot(one.named), before)
        training.assert_same(one.momenta(), momenta)
        assert one.voting.step == SICK_AT
        after = one.step(training.gradients(SICK_AT, channel.rank))
        one.lion.leave()
        return str(error.value), after

    outcomes = in_threads(3, worker)
    twin = play(3, SICK_AT + 1)
    for said, after in outcomes:
        assert said == outcomes[0][0]
        training.assert_same(after, twin.seen[-1])


@pytest.mark.parametrize("vote", ["majority", "average"])
@pytest.mark.parametrize(
    "sick", [{1: ["conv"]}, {0: ["conv"], 2: ["bias", "embed"]}, {2: ["embed", "conv", "head"]}]
)
def test_an_abstaining_worker_is_left_out_of_that_bucket_and_stays_finite(
    vote: str, sick: dict[int, list[str]]
) -> None:
    """The twin has no gradient there; its momentum and its vote stay out in just the same way."""
    data = Faulty(sick)
    twin = play(3, 8, vote, data.left_out)
    settings = LionSettings(vote=vote, nonfinite="abstain")
    runs = in_threads(3, lambda channel: Worker(channel, settings).train(8, data))
    pairs = sum(bool(set(names) & set(faults)) for names in BUCKETS for faults in sick.values())
    for rank, run in enumerate(runs):
        training.assert_same_steps(run, twin, rank)
        assert run.voting["abstentions"] == pairs
        for momentum in run.momenta.values():
            assert momentum.isfinite().all()
    training.assert_same(runs[0].momenta, twin.momenta)
    assert not torch.equal(twin.seen[-1]["conv"], play(3, 8, vote).seen[-1]["conv"])


def test_all_may_abstain() -> None:
    """Nobody votes: what there is of a step is the decay, and momenta stay."""
    everybody = {worker: ["embed"] for worker in range(3)}
    data, settings = Faulty(everybody), LionSettings(nonfinite="abstain")

    def worker(channel: Any) -> None:
        one = Worker(channel, settings)
        for step in range(SICK_AT):
            before = one.step(data(step, channel.rank))
        momenta = one.momenta()
        after = one.step(data(SICK_AT, channel.rank))
        one.lion.leave()
        assert torch.equal(after["embed"], before["embed"] * (1 - 0.01 * 0.3))
        assert torch.equal(one.momenta()["embed"], momenta["embed"])
        assert not torch.equal(one.momenta()["head"], momenta["head"])
        assert one.voting.abstentions == 3

    in_threads(3, worker)


# Parameters that differ


def flip_a_bit(parameter: torch.nn.Parameter) -> None:
    """The least of the last value: 1e-7 of it."""
    words = parameter.detach().view(-1).view(torch.int32)
    words[-1] ^= 1


@pytest.mark.parametrize(
    ("name", "every", "at", "found_at"),
    [("embed", 1, 2, 2), ("bias", 4, 1, 4), ("scale", 4, 4, 4), ("embed", 3, 0, 0)],
)
def test_a_flipped_bit_is_found_by_all_within_so_many_steps(
    name: str, every: int, at: int, found_at: int
) -> None:
    (bucket,) = (names for names in BUCKETS if name in names)
    said = ", ".join(map(repr, bucket))

    def worker(channel: Any) -> None:
        one = Worker(channel, LionSettings(check_drift_every=every))
        for step in range(found_at + 1):
            if step == at and channel.rank == 1:
                flip_a_bit(one.named[name])
            before = training.snapshot(one.named)
            if step < found_at:
                one.step(training.gradients(step, channel.rank))
        momenta = one.momenta()
        pattern = rf"parameters differ before step {found_at + 1}, including {said}\. Only votes"
        with pytest.raises(RuntimeError, match=pattern):
            one.step(training.gradients(found_at, channel.rank))
        training.assert_same(training.snapshot(one.named), before)
        for key, momentum in one.momenta().items():
            assert torch.equal(momentum, momenta.get(key, torch.zeros_like(momentum)))
        one.lion.leave()

    in_threads(3, worker)


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [(0, "lr", 0.005), (-1, "betas", (0.9, 0.98)), (0, "weight_decay", 0.0)],
)
def test_hyperparameters_that_differ_stop_all_before_anything_has_drifted(
    group: int, key: str, value: Any
) -> None:
    """As a scheduler does that watches a rank's own metric; also where nobody looks for drift."""

    def worker(channel: Any) -> dict[str, Any]:
        one = Worker(channel, LionSettings(check_drift_every=0))
        before = one.step(training.gradients(0, channel.rank))
        momenta, tuned = one.momenta(), one.lion.param_groups[group][key]
        if channel.rank == 1:
            one.lion.param_groups[group][key] = value
        shown = re.escape(f"{key} {one.lion.param_groups[group][key]}")
        with pytest.raises(
            RuntimeError, match=rf"different learning rates.* before step 2 .*{shown}"
        ):
            one.step(training.gradients(1, channel.rank))
        training.assert_same(training.snapshot(one.named), before)
        training.assert_same(one.momenta(), momenta)
        one.lion.param_groups[group][key] = tuned
        after = one.step(training.gradients(1, channel.rank))
        one.lion.leave()
        return after

    twin = play(3, 2)
    for after in in_threads(3, worker):
        training.assert_same(after, twin.seen[-1])


def test_learning_rates_may_be_tensors() -> None:
    def worker(channel: Any) -> dict[str, Any]:
        one = Worker(channel, LionSettings())
        for group in one.lion.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
        after = one.step(training.gradients(0, channel.rank))
        one.lion.leave()
        return after

    twin = play(2, 1)
    for after in in_threads(2, worker):
        training.assert_same(after, twin.seen[-1])


def test_nobody_looks_for_drift_if_that_is_said() -> None:
    def worker(channel: Any) -> None:
        one = Worker(channel, LionSettings(check_drift_every=0))
        if channel.rank == 1:
            flip_a_bit(one.named["head"])
        for step in range(5):
            one.step(training.gradients(step, channel.rank))
        one.lion.leave()

    in_threads(3, worker)


def test_nan_in_the_parameters_is_no_drift() -> None:
    """The hash is of bits: what is not equal to itself is still the same on all ranks."""

    def worker(channel: Any) -> None:
        one = Worker(channel, LionSettings(check_drift_every=1))
        one.named["head"].data[3, 3] = math.nan
        for step in range(3):
            one.step(training.gradients(step, channel.rank))
        one.lion.leave()

    in_threads(2, worker)
