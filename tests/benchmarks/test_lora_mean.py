"""The residual of LoRA's mean: zero for equal replicas, and folded in, the mean is exact."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from benchmarks.lora_mean.__main__ import CELLS, Results, planned, table, verdict
from benchmarks.lora_mean.simulated import Found, adapters, fold, mean_updates, norm
from tests.fit.causal_lm import make


def replicas(kind: str) -> list[Any]:
    lora = LoraConfig(r=2, target_modules="all-linear", fan_in_fan_out=kind == "gpt2")
    first = get_peft_model(make(kind), lora).double()
    modules = [first, copy.deepcopy(first), copy.deepcopy(first)]
    for module in modules:
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter)
    return modules


def merged(module: Any) -> list[Tensor]:
    """The weights with their updates, which peft adds in the layout of the weight."""
    layers = adapters(module)
    return [one.get_base_layer().weight + one.get_delta_weight("default") for one in layers]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_folded_mean_is_the_mean_of_the_products(kind: str) -> None:
    modules = replicas(kind)
    expected = [sum(weights) / 3 for weights in zip(*map(merged, modules), strict=True)]
    updates = mean_updates(modules)
    mean = copy.deepcopy(modules[0])
    with torch.no_grad():
        for parameter, *others in zip(
            mean.parameters(), *(module.parameters() for module in modules), strict=True
        ):
            parameter.copy_(sum(others) / 3)
    plain = [got - right for got, right in zip(merged(mean), expected, strict=True)]
    assert norm(plain) == pytest.approx(norm([update.residual for update in updates]))
    assert norm(plain) > 1, "the mistake that would be seen"
    fold(mean, updates)
    for got, right in zip(merged(mean), expected, strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("gain", "says"), [(0.001, "is within"), (0.5, "costs more than")])
def test_the_verdict_follows_the_criterion(gain: float, says: str) -> None:
    results: Results = {
        run: Found(0.1, 3 + 0.01 * run.seed - gain * run.exact, 3 + 0.01 * run.seed - gain)
        for run in planned(3)
    }
    assert says in verdict(results, 3)
    assert f"| 3.0200 ± 0.0100 | {-gain:+.4f} ± 0.0000 |" in table(results, 3)[2]
    assert replace(CELLS[0], seed=1) in results
