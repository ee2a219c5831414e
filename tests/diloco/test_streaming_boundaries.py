"""Where the algorithm collapses to something known: plain training, averaging, DDP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.diloco.training import (
    ADAMW,
    AVERAGING,
    PLAIN_SGD,
    InnerOptimizer,
    Net,
    Run,
    State,
    assert_same_bits,
    backward,
    bits,
    largest_difference,
    state_of,
    train,
)
from tests.world import run_ranks


@pytest.mark.parametrize("size", [2, 3])
def test_every_step_with_lr_1_is_data_parallel_sgd(size: int, tmp_path: Path) -> None:
    """P = H = 1, overlap 0, mix 0: the mean of the parameters is a step along the mean gradient.

    To rounding: x - mean(x - x_m) and x - lr mean(g_m) round in different places.
    """
    changes = {"sync_every": 1, "num_fragments": 1, "overlap_steps": 0, "mix": 0.0}
    run = Run(6, {**changes, "outer_optimizer": AVERAGING}, inner=PLAIN_SGD, finish=False)

    def data_parallel(divisor: int) -> list[State]:
        module, states = Net(), []
        optimizer = PLAIN_SGD(module.parameters())
        for step in range(1, run.steps + 1):
            gradients = []
            for replica in range(size):
                backward(module, replica, step)
                gradients.append([p.grad.clone() for p in module.parameters()])
            for parameter, of_replicas in zip(
                module.parameters(), zip(*gradients, strict=True), strict=True
            ):
                parameter.grad = torch.stack(of_replicas).sum(0) / divisor
            optimizer.step()
            states.append(state_of(module))
        return states

    tolerance = 1e-6  # parameters near 1, where an fp32 step is 1e-7, six steps
    for trace in run_ranks(train, size, tmp_path, run):
        assert largest_difference(trace.local, data_parallel(size)) < tolerance
        assert largest_difference(trace.local, data_parallel(1)) > 1000 * tolerance, "a sum passes"


def test_every_third_step_with_lr_1_is_parameter_averaging(tmp_path: Path) -> None:
    """With AdamW inside, whose state stays each replica's own."""
    size = 3
    changes = {"sync_every": 3, "num_fragments": 1, "overlap_steps": 0, "mix": 0.0}
    run = Run(9, {**changes, "outer_optimizer": AVERAGING}, finish=False)

    def averaged(every: int) -> list[list[State]]:
        modules = [Net() for _ in range(size)]
        optimizers = [ADAMW(module.parameters()) for module in modules]
        by_replica: list[list[State]] = [[] for _ in modules]
        for step in range(1, run.steps + 1):
            for replica, (module, optimizer) in enumerate(zip(modules, optimizers, strict=True)):
                backward(module, replica, step)
                optimizer.step()
            if step % every == 0:
                with torch.no_grad():
                    for of_replicas in zip(*[m.parameters() for m in modules], strict=True):
                        mean = torch.stack(list(of_replicas)).mean(0)
                        for parameter in of_replicas:
                            parameter.copy_(mean)
            for states, module in zip(by_replica, modules, strict=True):
                states.append(state_of(module))
        return by_replica

    tolerance = 1e-5  # AdamW divides by the root of small moments, which magnifies rounding
    traces = run_ranks(train, size, tmp_path, run)
    for trace, right, late in zip(traces, averaged(3), averaged(4), strict=True):
        assert largest_difference(trace.local, right) < tolerance
        assert largest_difference(trace.local, late) > 100 * tolerance


@pytest.mark.parametrize("mix", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_fragments", [1, 2])
def test_one_replica_with_lr_1_is_plain_training(mix: float, num_fragments: int) -> None:
    """To rounding: old - (old - new) is new where new is within a factor of 2 of old."""
    changes = {"sync_every": 3, "num_fragments": num_fragments, "overlap_steps": 0, "mix": mix}
    run = Run(8, {**changes, "outer_optimizer": AVERAGING}, inner=PLAIN_SGD)
    trace = train(0, 1, run)
    module = Net()
    plain = plain_training(module, PLAIN_SGD, 0, run.steps)
    plain.append(plain[-1])  # `finish` changes nothing
    assert largest_difference(trace.local, plain) < 1e-6
    nesterov = train(0, 1, Run(8, {**changes, "mix": 0.0}, inner=PLAIN_SGD))
    assert largest_difference(nesterov.local, plain) > 1e-3, "any outer optimizer would pass"


def plain_training(
    module: nn.Module, inner: InnerOptimizer, replica: int, steps: int
) -> list[State]:
    optimizer, states = inner(list(module.parameters())), []
    for step in range(1, steps + 1):
        backward(module, replica, step)
        optimizer.step()
        states.append(state_of(module))
    return states


def test_mix_1_is_independent_runs_bit_for_bit(tmp_path: Path) -> None:
    changes = {"sync_every": 3, "num_fragments": 2, "overlap_steps": 2, "mix": 1.0}
    run = Run(11, {**changes, "wire_dtype": "fp4"}, finish=False)
    traces = run_ranks(train, 2, tmp_path, run)
    for rank, trace in enumerate(traces):
        independent = plain_training(Net(), ADAMW, rank, run.steps)
        for step, (got, expected) in enumerate(zip(trace.local, independent, strict=True), 1):
            for name, tensor in expected.items():
                assert torch.equal(bits(got[name]), bits(tensor)), f"rank {rank} {step} {name}"
    assert not torch.equal(traces[0].outer[-1][0], traces[0].outer[0][0]), "something did land"


def test_two_replicas_with_the_same_data_are_one(tmp_path: Path) -> None:
    """(d + d) / 2 is d, exactly. At the end one alone sends nothing, and rounds nothing."""
    run = Run(11, {"wire_dtype": "fp4", "num_fragments": 2}, same_data=True, finish=False)
    one = train(0, 1, run)
    for rank, trace in enumerate(run_ranks(train, 2, tmp_path, run)):
        assert_same_bits(trace, one, f"rank {rank}")
