"""A step on a CUDA device, simulated without one: devices, and what the host waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_commfree.domino import (
    GradientAverage,
    ShardedModule,
    gradient_norm,
    looks_finite,
    refuse_nonfinite,
)
from lightning_commfree.domino.schedule import ScheduleRun
from lightning_commfree.fit.checks import check_batch
from tests.cuda_walk import CPU, CUDA, CudaWalk, InstantChannel, Question, is_walked
from tests.domino.models import Case, batch_for, make_for
from tests.domino.ranks import divide
from tests.kernels import KernelCount

F32, BF16 = torch.float32, torch.bfloat16
CASES = [
    Case("gpt2", 2, dtype=F32),
    Case("llama", 3, "batch", 3, padding="right", dtype=F32),
    Case("llama one key head", 2, "token", 3, loss="gathered", embeds=True, dtype=F32),
    Case("mistral", 2, "none", frozen="embeddings", dtype=F32),
    Case("qwen3", 2, "weight", 3, checkpoint=True, dtype=BF16),
]
# dropout inside attention, whose random numbers are each rank's own, and behind it
DROPOUT = {"gpt2": {"attn_pdrop": 0.1, "resid_pdrop": 0.1}}
MASKED_ROW = Case("gpt2", 1, padding="left", dtype=F32)

# What a step waits for, by the step at which it happens, and why.
EVERY_STEP = {
    # NaN and Inf end the fit before the optimizer steps, so the host must know. Backward is over
    # by then, and nothing of the next step can be launched before the optimizer's.
    Question("gradients", "comm/background.py wait", "wait"),
}
ONE_ROW_WITH_A_MASK = {
    # A batch of one row is split by tokens if its mask is causal.
    Question("forward", "domino/splits.py is_causal", "value"),
}
FIRST_BATCH = {
    # The ranks of a tensor group must have the same batch: they exchange its digest as text.
    Question("first batch", "fit/checks.py check_batch", "value"),
}
AFTER_A_SUSPICION = {
    # The fit is about to end: the error names the tensor that is not finite.
    Question("suspicion", "domino/gradients.py refuse_nonfinite", "value"),
    Question("suspicion", "domino/gradients.py _describe_nonfinite", "value"),
}


def on_cuda(batch: dict[str, Any]) -> dict[str, Any]:
    return {
        key: torch.empty(value.shape, dtype=value.dtype, device=CUDA).requires_grad_(
            value.requires_grad
        )
        if isinstance(value, Tensor)
        else value
        for key, value in batch.items()
    }


class Step:
    """A training step on rank 1 of 2, and of 2 replicas; `channel(size, rank)` opens a channel."""

    def __init__(self, walk: CudaWalk, case: Case, model: Any, channel: Any) -> None:
        self.walk, self.case, self.events = walk, case, Counter[str]()
        self.model = walk.on_cuda(model)
        self.parallel = divide(self.model, channel(2, 1), case)
        self.average = GradientAverage(channel(2, 0))
        self.parallel.done = self.average.launch_sublayer
        self.parallel.trace = self._trace
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def _trace(self, what: str, sublayer: str, i: int) -> None:
        self.events[what] += 1

    def forward(self) -> Tensor:
        batch = on_cuda(batch_for(self.case))
        with self.walk.during("forward"):
            if self.case.loss == "own":
                loss: Tensor = self.model(**batch).loss
                return loss
            labels = batch.pop("labels")
            return self.model(**batch).logits.gather(-1, labels[..., None]).mean()

    def gradients(self) -> None:
        """From backward to the clipped gradient, as `DominoTPStrategy` does it."""
        parameters = list(self.model.parameters())
        sharded = ShardedModule(self.model, self.parallel.group.channel, [self.parallel])
        with self.walk.during("gradients"):
            looks_finite(parameters)
            self.average.land(parameters)
            sharded.sum_shared_gradients()
            norm = gradient_norm(parameters, sharded.specs, self.parallel.group)
            torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)
        assert is_walked(norm)

    def take(self) -> None:
        loss = self.forward()
        assert is_walked(loss)
        with self.walk.during("backward"):
            loss.backward()
        self.gradients()
        with self.walk.during("optimizer"):
            self.optimizer.step()
        assert all(is_walked(p.grad) for p in self.model.parameters() if p.grad is not None)


@contextmanager
def walking(
    case: Case, walk: CudaWalk | None = None, channel: Any = InstantChannel, **more: Any
) -> Iterator[Step]:
    """Simulate a device in the body, with a model of the case on it; `more` is for its config."""
    model = make_for(case, **{**DROPOUT.get(case.kind, {}), **more})
    with walk or CudaWalk() as walk:
        yield Step(walk, case, model, channel)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_waits_for_nothing_but_the_finite_norm(case: Case) -> None:
    with walking(case) as step:
        step.take()
    assert step.walk.asked() == EVERY_STEP
    assert len(step.walk.questions) == 1
    assert step.events["launch backward"] == step.events["land backward"] > 0, "it was scheduled"


def test_one_row_with_a_mask_waits_for_the_mask() -> None:
    with walking(MASKED_ROW, CudaWalk({"domino/splits.py is_causal": False})) as step:
        step.take()
    assert step.walk.asked() == EVERY_STEP | ONE_ROW_WITH_A_MASK


def test_the_norm_takes_few_kernels_however_many_gradients_there_are() -> None:
    found = []
    for layers in (2, 4):
        case = Case("llama one key head", 2, dtype=F32)
        with walking(case, num_hidden_layers=layers) as step:
            step.forward().backward()
            with KernelCount() as count:
                gradient_norm(
                    step.model.parameters(), step.parallel.sharding.specs, step.parallel.group
                )
        found.append(sum(count.kernels.values()))
    assert found[0] == found[1] < 25, "sharded, sharded by several ranks, and full gradients"


def test_the_first_batch_is_compared() -> None:
    with CudaWalk() as walk, walk.during("first batch"):
        channel: Any = InstantChannel(2, device=CPU)
        check_batch(channel, "train", on_cuda(batch_for(CASES[0])))
    assert walk.asked() == FIRST_BATCH


def test_a_nonfinite_norm_is_investigated(monkeypatch: pytest.MonkeyPatch) -> None:
    # the ranks exchange text as bytes on the CPU, and the simulated device has no values
    alone = "lightning_commfree.domino.gradients.gather_texts"
    monkeypatch.setattr(alone, lambda channel, text: [text] * channel.size)
    channel: Any = InstantChannel(2, device=CPU)
    with walking(CASES[0]) as step:
        loss = step.forward()
        loss.backward()
        with step.walk.during("suspicion"):
            refuse_nonfinite(channel, step.model, loss, 1, group_size=2)
    assert step.walk.asked() == AFTER_A_SUSPICION


# The tests above can fail.


def planted(patch: pytest.MonkeyPatch, method: str, plant: Any) -> None:
    """Let a method of the schedule apply `plant` to the tensor that it returns."""
    whole = getattr(ScheduleRun, method)

    def more(run: ScheduleRun, *args: Any) -> Any:
        found = whole(run, *args)
        plant(found)
        return found

    patch.setattr(ScheduleRun, method, more)


@pytest.mark.parametrize(("method", "during"), [("_land", "forward"), ("backward", "backward")])
def test_a_planted_item_is_seen(monkeypatch: pytest.MonkeyPatch, method: str, during: str) -> None:
    planted(monkeypatch, method, lambda tensor: tensor.sum().item())
    with walking(CASES[0]) as step:
        step.take()
    here = "tests/domino/test_cuda.py <lambda>"
    assert Question(during, here, "value") in step.walk.asked()


def test_a_planted_tensor_of_the_cpu_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, "_land", lambda tensor: tensor.add_(torch.ones(tensor.shape)))
    with walking(CASES[0]) as step, pytest.raises(RuntimeError, match="cpu and cuda:1"):
        step.take()
