"""Gradients of linear layers' weights come after the launch of dx's all-reduce, and are exact."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_commfree.domino.layers import ColumnLinear, RowLinear
from tests.cuda_walk import CPU, InstantChannel
from tests.domino.models import LAYERS, Case, batch_for, make_for, step
from tests.domino.ranks import divide

SPLITS = [("none", 1), ("batch", 2)]  # with the number of micro-batches
LINEARS = {  # in a sublayer, by the end of its name
    "gpt2": {"attention": 2, "mlp": 2},
    "llama": {"attention": 4, "mlp": 3},
}
LOGGED = ("mm", "addmm", "_to_copy")


class Log(TorchDispatchMode):
    """Logs the schedule's events, and operations whose result has the shape of a linear's weight.

    Batches are chosen so that no activation has such a shape.
    """

    def __init__(self, model: Any, parallel: Any) -> None:
        super().__init__()
        linears = [m for m in model.modules() if isinstance(m, ColumnLinear | RowLinear)]
        self.shapes = {linear.weight.shape for linear in linears}
        self.lines: list[Any] = []
        parallel.trace = lambda *event: self.lines.append(event)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in LOGGED and result.shape in self.shapes:
            self.lines.append("cast" if name == "_to_copy" else "weight gradient")
        return result


def logged(case: Case, autocast: bool = False) -> list[Any]:
    """Return the log of a training step of one rank of two."""
    model = make_for(case)
    channel: Any = InstantChannel(2, device=CPU)
    log = Log(model, divide(model, channel, case))
    with log, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**batch_for(case)).loss
    with log:
        loss.backward()
    return log.lines


@pytest.mark.parametrize(("split", "micro_batches"), SPLITS)
@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
def test_dx_is_launched_before_any_weight_gradient(
    kind: str, split: str, micro_batches: int, again: bool
) -> None:
    """All of them are computed right after it, before any sum lands."""
    lines = logged(Case(kind, 5, split, checkpoint=again))
    for layer in range(LAYERS):
        for name, linears in LINEARS[kind].items():
            sublayer = f"layer {layer} {name}"
            for i in range(micro_batches):
                begin = lines.index(("body backward", sublayer, i))
                launch = lines.index(("launch backward", sublayer, i))
                assert "weight gradient" not in lines[begin:launch]
                weights, *found = lines[launch + 1 : launch + 2 + linears]
                assert weights == ("weights backward", sublayer, i)
                assert found == ["weight gradient"] * linears


@pytest.mark.parametrize("split", [split for split, _ in SPLITS])
def test_frozen_weights_get_no_gradient(split: str) -> None:
    lines = logged(Case("llama", 5, split, frozen="layers"))
    frozen = False
    count = {True: 0, False: 0}
    for line in lines:
        if isinstance(line, tuple):
            frozen = line[1].startswith("layer 0")
        elif line == "weight gradient":
            count[frozen] += 1
    linears = (LAYERS - 1) * sum(LINEARS["llama"].values())
    assert count == {True: 0, False: dict(SPLITS)[split] * linears}


@pytest.mark.parametrize("kind", LINEARS)
def test_autocast_casts_each_weight_once(kind: str) -> None:
    """As by autocast's own cache; each of the micro-batches would cast them otherwise."""
    lines = logged(Case(kind, 6, "batch", 3, dtype=torch.float32), autocast=True)
    forward = lines[: next(n for n, line in enumerate(lines) if "body backward" in line)]
    assert forward.count("cast") == LAYERS * sum(LINEARS[kind].values())


# Bodies that a user has changed


def checkpointed(mlp: Any, reentrant: bool) -> None:
    mlp.forward = partial(checkpoint, mlp.forward, use_reentrant=reentrant)


def compiled(mlp: Any) -> None:
    mlp.compile(backend="aot_eager", fullgraph=True)


def gradients(change: Callable[[Any], None] | None, split: str) -> list[Tensor]:
    case = Case("llama", 4, split)
    model = make_for(case)
    channel: Any = InstantChannel(2, device=CPU)
    divide(model, channel, case)
    if change is not None:
        change(model.model.layers[1].mlp)
    for _ in range(2):  # accumulated
        step(model, case, batch_for(case))
    return [p.grad for p in model.parameters()]


CHANGED = {
    "checkpointed": partial(checkpointed, reentrant=False),
    "checkpointed, reentrant": partial(checkpointed, reentrant=True),
    "compiled": compiled,
}


@pytest.mark.parametrize("split", [split for split, _ in SPLITS])
@pytest.mark.parametrize("name", CHANGED)
def test_changed_bodies_have_the_same_gradients(name: str, split: str) -> None:
    for ours, plain in zip(gradients(CHANGED[name], split), gradients(None, split), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


def test_hooks_of_a_weight_see_the_gradient_of_each_micro_batch() -> None:
    case = Case("gpt2", 4, "batch")
    model = make_for(case)
    channel: Any = InstantChannel(2, device=CPU)
    divide(model, channel, case)
    weight, seen, accumulated = model.transformer.h[1].attn.c_attn.weight, [], []
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    weight.register_post_accumulate_grad_hook(lambda p: accumulated.append(p.grad.clone()))
    step(model, case, batch_for(case))
    assert len(seen) == len(accumulated) == 2
    assert torch.equal(accumulated[1], seen[0] + seen[1])
    assert torch.equal(weight.grad, accumulated[1])
