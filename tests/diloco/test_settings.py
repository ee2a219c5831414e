"""Every value out of range is answered by a sentence: what came, what is legal, what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_commfree.diloco.settings import DiLoCoSettings, default_outer_optimizer

LEGAL: dict[str, Any] = {
    "sync_every": 100,
    "num_fragments": None,
    "fragment_pattern": "strided",
    "overlap_steps": 1,
    "mix": 0.5,
    "wire_dtype": "fp4",
    "outer_optimizer": None,
    "replica_size": 1,
    "inside": "ddp",
    "nonfinite": "raise",
    "evaluate": "outer",
    "check_drift_every": 1,
    "outer_device": None,
}


def make(**changes: Any) -> DiLoCoSettings:
    return DiLoCoSettings(**{**LEGAL, **changes})


REFUSED = [
    (
        {"evaluate": "local"},
        r"`evaluate='local'` is not valid. Choose 'outer' \(the outer weights\) or 'mean'",
    ),
    ({"nonfinite": "skip"}, r"`nonfinite='skip'` is not valid. Choose one of 'raise', 'abstain'"),
    ({"outer_device": "tpu"}, r"`outer_device='tpu'` is not valid. Choose 'cpu'"),
    ({"check_drift_every": -1}, r"`check_drift_every=-1` must be at least 0, where 0 means never"),
    ({"sync_every": 0, "overlap_steps": 0}, r"`sync_every=0` must be at least 1: it counts"),
    ({"num_fragments": 0}, r"`num_fragments=0` must be at least 1, or None to derive it"),
    (
        {"fragment_pattern": "stripes"},
        r"`fragment_pattern='stripes'` is not valid\. Choose one of"
        r" 'strided', 'sequential', 'balanced'\.",
    ),
    (
        {"sync_every": 4, "overlap_steps": 4},
        r"`overlap_steps=4` must be at least 0 and below `sync_every=4`: a fragment has to land"
        r" before its next launch\. Lower `overlap_steps` or raise `sync_every`\.",
    ),
    ({"overlap_steps": -1}, r"`overlap_steps=-1` must be at least 0"),
    ({"mix": 1.5}, r"`mix=1\.5` is outside \[0, 1\]\. It is the weight of the local parameters"),
    ({"mix": float("nan")}, r"`mix=nan` is outside \[0, 1\]"),
    (
        {"wire_dtype": "fp8"},
        r"`wire_dtype='fp8'` is not valid\. Choose one of 'fp32', 'bf16', 'int8', 'fp4', 'int2',",
    ),
    ({"replica_size": 0}, r"`replica_size=0` must be at least 1: it counts the ranks of"),
]


@pytest.mark.parametrize(("changes", "text"), REFUSED)
def test_values_out_of_range_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make(**changes)


@pytest.mark.parametrize(
    ("outer_optimizer", "came"),
    [("sgd", "str"), (torch.optim.SGD([nn.Parameter(torch.ones(1))]), "SGD")],
)
def test_an_outer_optimizer_that_is_no_factory_is_refused(outer_optimizer: Any, came: str) -> None:
    text = (
        r"`outer_optimizer` must be a factory that takes a list of parameters, such as"
        rf" `functools\.partial\(torch\.optim\.SGD, lr=0\.4\)`, but it is a {came}\."
    )
    with pytest.raises(TypeError, match=text):
        make(outer_optimizer=outer_optimizer)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sync_every", True),
        ("sync_every", "100"),
        ("num_fragments", 1.5),
        ("mix", "0.5"),
    ],
)
def test_a_number_of_another_kind_is_refused_by_name(name: str, value: Any) -> None:
    """From a config file `1e2` is a float and `"100"` a string; half a step counts nothing."""
    with pytest.raises((TypeError, ValueError), match=f"`{name}={value!r}`"):
        make(**{name: value})


def test_facts_hold_every_setting_that_two_ranks_can_compare() -> None:
    fingerprint = make().fingerprint()
    assert fingerprint.keys() == LEGAL.keys() - {"outer_optimizer"}
    assert fingerprint["sync_every"] == "100"
    assert fingerprint["wire_dtype"] == "'fp4'"
    assert fingerprint["num_fragments"] == "None"
    changes = {
        "sync_every": 50,
        "num_fragments": 2,
        "fragment_pattern": "balanced",
        "overlap_steps": 0,
        "mix": 0.0,
        "wire_dtype": "bf16",
    }
    for name, value in changes.items():
        other = make(**{name: value}).fingerprint()
        assert {key for key in fingerprint if fingerprint[key] != other[key]} == {name}


@pytest.mark.parametrize(
    ("replicas", "sync_every", "lr"),
    [(1, 100, 0.4), (2, 500, 0.4), (3, 100, 0.4), (4, 99, 0.4), (4, 100, 0.8), (8, 500, 0.8)],
)
def test_the_default_outer_optimizer_depends_on_the_replicas_and_steps(
    replicas: int, sync_every: int, lr: float
) -> None:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = default_outer_optimizer(replicas, sync_every)(parameters)
    assert isinstance(optimizer, torch.optim.SGD)
    (group,) = optimizer.param_groups
    assert group["params"] == parameters
    chosen = {"lr": lr, "momentum": 0.9, "nesterov": True, "dampening": 0, "weight_decay": 0}
    assert {name: group[name] for name in chosen} == chosen
