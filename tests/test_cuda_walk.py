"""The walk sees what it is for: each kind of question, and each tensor on another device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cuda_walk import CudaWalk, Question, is_walked

ASKS: dict[str, tuple[Callable[[Tensor], Any], set[str]]] = {
    "item": (lambda x: x.sum().item(), {"value"}),
    "bool": (lambda x: bool((x > 0).all()), {"value"}),
    "float": (lambda x: float(x[0, 0]), {"value"}),
    "tolist": (lambda x: x.tolist(), {"value"}),
    "equal": (lambda x: torch.equal(x, x), {"value"}),
    "if": (lambda x: 1 if x[0, 0] > 0 else 2, {"value"}),
    "nonzero": (lambda x: x.nonzero(), {"shape"}),
    "where": (lambda x: torch.where(x > 0), {"shape"}),
    "mask": (lambda x: x[x > 0], {"shape"}),
    "put": (lambda x: x.index_put_((x > 0,), x.new_zeros(())), {"shape"}),
    "select": (lambda x: x.masked_select(x > 0), {"shape"}),
    "unique": (lambda x: x.unique(), {"shape"}),
    "cpu": (lambda x: x.cpu(), {"copy down"}),
    "copy down": (lambda x: torch.empty(3, 4).copy_(x), {"copy down"}),
    "copy up": (lambda x: x.copy_(torch.empty(3, 4)), {"copy up"}),
    "new": (lambda x: torch.tensor([1.0, 2.0], device=x.device), {"copy up"}),
    "pageable": (lambda x: torch.empty(3).to(x.device, non_blocking=True), {"copy up, not pinned"}),
    "event": (lambda _: torch.cuda.Event().synchronize(), {"wait"}),
    "stream": (lambda _: torch.cuda.current_stream().synchronize(), {"wait"}),
    "device": (lambda _: torch.cuda.synchronize(), {"wait"}),
}
QUIET: dict[str, Callable[[Tensor], Any]] = {
    "number": lambda x: x * 0.5 + torch.tensor(2.0),
    "masked": lambda x: x.masked_fill_(x > 0, 1.0).where(x > 0, 2.0),
    "later": lambda x: torch.empty(3, 4, pin_memory=True).copy_(x, non_blocking=True),
    "pinned": lambda x: torch.empty(3).pin_memory()[1:].to(x.device, non_blocking=True),
    "norm": lambda x: torch.nn.utils.get_total_norm([x, x]).isfinite(),
    "slice": lambda x: x[1:, ::2].reshape(-1)[torch.zeros(2, dtype=torch.int64, device=x.device)],
    "of the CPU": lambda _: torch.ones(2).sum().item(),
    "shape of the CPU": lambda _: torch.ones(2).nonzero(),
}
MIXED: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x + torch.ones(3, 4),
    "in place": lambda x: x.add_(torch.ones(3, 4)),
    "index": lambda x: x[torch.tensor([0, 1])],
    "indexed": lambda x: torch.ones(3)[x.long()[0]],
    "of another device": lambda x: x + torch.ones(3, 4, device="cuda:0"),
    "made before": lambda x: x + BEFORE,
    "cat": lambda x: torch.cat([x, torch.ones(3, 4)]),
}
BEFORE = torch.ones(3, 4)


@pytest.mark.parametrize("name", ASKS)
def test_a_question_is_kept(name: str) -> None:
    asks, kinds = ASKS[name]
    with CudaWalk() as walk, walk.during("now"):
        asks(torch.empty(3, 4, device=walk.device))
    assert walk.asked() == {Question("now", "tests/test_cuda_walk.py <lambda>", k) for k in kinds}


@pytest.mark.parametrize("name", QUIET)
def test_work_on_the_device_alone_is_no_question(name: str) -> None:
    with CudaWalk() as walk:
        QUIET[name](torch.empty(3, 4, device=walk.device))
    assert walk.questions == []


@pytest.mark.parametrize("name", MIXED)
def test_a_tensor_of_the_cpu_is_seen(name: str) -> None:
    with CudaWalk() as walk:
        x = torch.empty(3, 4, device=walk.device)
        with pytest.raises(RuntimeError, match=r"tensors? (on|to be on)|cuda:1.*(cpu|cuda:0)"):
            MIXED[name](x)


def test_answers() -> None:
    """A place is told what its tensor holds; others get True, or 1."""

    def told(x: Tensor) -> tuple[bool, int, float]:
        return bool(x.sum() > 0), int(x.long().sum()), x.sum().item()

    with CudaWalk({"tests/test_cuda_walk.py told": 0}) as walk:
        x = torch.empty(3, device=walk.device)
        assert told(x) == (False, 0, 0.0)
        assert (bool(x.sum() > 0), int(x.long().sum())) == (True, 1)


def test_autograd_stays_on_the_device() -> None:
    """Gradients, their norm, the optimizer's step; a tied weight stays one."""
    module = nn.ModuleDict({"words": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    module["head"].weight = module["words"].weight
    with CudaWalk() as walk:
        walk.on_cuda(module)
        assert module["head"].weight is module["words"].weight
        optimizer = torch.optim.AdamW(module.parameters())
        words = torch.zeros(3, dtype=torch.int64, device=walk.device)
        logits = module["head"](module["words"](words))
        logits.logsumexp(-1).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        assert all(is_walked(p.grad) for p in module.parameters())
    assert walk.questions == []


def test_nothing_is_left_behind() -> None:
    before = torch.cuda.Event, torch.cuda.get_rng_state
    with pytest.raises(RuntimeError, match="cuda:1"), CudaWalk() as walk:
        torch.empty(2, device=walk.device).add_(torch.ones(2))
    assert (torch.cuda.Event, torch.cuda.get_rng_state) == before
    assert type(torch.ones(1)) is Tensor
