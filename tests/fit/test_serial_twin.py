"""The real strategy, in a real Trainer on real gloo ranks, against the serial twin, after every
step.

Both sides make the same fp32 operations in the same order (differences are gathered and added in
rank order, never all-reduced), so the comparison is bit for bit: rtol = atol = 0.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_commfree import StreamingDiLoCoStrategy
from lightning_commfree.diloco import split_into_fragments
from tests.diloco.serial import SerialDiLoCo
from tests.fit.models import Recorder, Tiny, assert_same, dataset, quiet_trainer, rank_loader
from tests.pairs import pairwise
from tests.world import run_ranks

STEPS = 15  # two and a half cycles of H = 6, so that the fit ends with fragments in flight
BATCH = 2
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
FACTORS = {
    "num_fragments": (1, 2, 3),
    "sync_every": (4, 6),
    "overlap_steps": (0, 1, 3),
    "mix": (0.0, 0.5, 1.0),
}
CASES = [tuple(case.values()) for case in pairwise(FACTORS)]


def fit(rank: int, size: int) -> list[Any]:
    return [fit_one(rank, size, *case) for case in CASES]


def fit_one(
    rank: int, size: int, num_fragments: int, sync_every: int, overlap_steps: int, mix: float
) -> Any:
    strategy = StreamingDiLoCoStrategy(
        sync_every=sync_every,
        num_fragments=num_fragments,
        overlap_steps=overlap_steps,
        mix=mix,
        wire_dtype="fp32",
        outer_optimizer=OUTER,
    )
    recorder = Recorder()
    trainer = quiet_trainer(strategy=strategy, devices=size, max_epochs=1, callbacks=[recorder])
    module = Tiny()
    trainer.fit(module, rank_loader(STEPS * BATCH * size, BATCH, rank, size))
    final = {name: p.detach().clone() for name, p in module.named_parameters()}
    return recorder.local, recorder.outer, final, strategy.fragments


def play(
    size: int,
    fragments: list[list[str]],
    sync_every: int,
    overlap_steps: int,
    mix: float,
    kind: type[Tiny] = Tiny,
    make_outer: Any = OUTER,
) -> Any:
    """The same training in this process; also returns the global copies after every step."""
    modules = [kind() for _ in range(size)]
    optimizers: list[Any] = [module.configure_optimizers() for module in modules]
    x, y = dataset(STEPS * BATCH * size).tensors

    def inner_step(replica: int, step: int) -> None:
        rows = slice((step - 1) * BATCH * size + replica, step * BATCH * size, size)
        optimizers[replica].zero_grad()
        modules[replica].loss((x[rows], y[rows])).backward()
        optimizers[replica].step()

    twin = SerialDiLoCo(modules, inner_step, fragments, sync_every, overlap_steps, mix, make_outer)
    local: list[list[dict[str, Tensor]]] = [[] for _ in modules]
    outer = []
    for step in range(1, STEPS + 1):
        twin.run_step()
        if step == STEPS:
            twin.finish()
        for m, module in enumerate(modules):
            local[m].append(copy.deepcopy({n: p.detach() for n, p in module.named_parameters()}))
        outer.append([torch.cat([twin.outer[n].detach().flatten() for n in f]) for f in fragments])
    return local, outer


@pytest.mark.parametrize("size", [1, 3])
def test_equals_the_serial_twin_after_every_step(size: int, tmp_path: Path) -> None:
    ranks = run_ranks(fit, size, tmp_path)
    for i, (num_fragments, sync_every, overlap_steps, mix) in enumerate(CASES):
        fragments = ranks[0][i][3]
        assert len(fragments) == num_fragments
        local, outer = play(size, fragments, sync_every, overlap_steps, mix)
        for rank in range(size):
            got_local, got_outer, final, _ = ranks[rank][i]
            assert len(got_local) == STEPS
            for step in range(STEPS):
                case = f"M={size} {CASES[i]} rank {rank} step {step + 1}"
                assert_same(got_local[step], local[rank][step])
                for expected, copy_ in zip(outer[step], got_outer[step], strict=True):
                    assert torch.equal(copy_, expected), f"{case} global copy"
            for name, expected in ranks[0][i][2].items():
                assert torch.equal(final[name], expected), (
                    f"rank {rank} ends with other weights: {name}"
                )


def test_the_likely_mistakes_would_be_seen() -> None:
    """A landing one step late, or the other weight in the mix, differs from the twin: the test
    above is not vacuous."""
    fragments = [list(f.parameters) for f in split_into_fragments(Tiny(), 1, "strided")]
    right, _ = play(2, fragments, 4, 1, 0.25)
    late, _ = play(2, fragments, 4, 2, 0.25)
    other_mix, _ = play(2, fragments, 4, 1, 0.75)
    name = fragments[0][0]
    assert not torch.equal(right[0][5][name], late[0][5][name])
    assert not torch.equal(right[0][5][name], other_mix[0][5][name])
