"""The algorithm: a trace by hand, the serial twin, and what between two steps changes nothing."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_commfree.diloco import StreamingDiLoCo
from tests.diloco.training import (
    Net,
    Run,
    Trace,
    after_some_steps,
    all_bits,
    alone,
    assert_equal_states,
    assert_same_bits,
    bits,
    largest_difference,
    start,
    state_of,
    train,
    twin,
    world,
)
from tests.world import run_ranks

# By hand


class Two(nn.Module):
    """Two numbers, a fragment each; every inner step takes a constant off."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1))
        self.y = nn.Parameter(torch.zeros(1))


HALF = partial(torch.optim.SGD, lr=0.5, momentum=0.5, nesterov=True)
# H = 4, P = 2, tau = 1, mix 0.5; m <- 0.5 m + mean, X <- X - 0.5 (mean + 0.5 m). Each step takes 1
# off on rank 0 and 3 on rank 1. All numbers are exact in binary. `x` leaves after steps 4, 8, 12:
#
# | launch | X - x, both ranks | mean | m    | X lands at step, value | x mixed, from            |
# |      4 | 4, 12             | 8    | 8    | 5: 0 - 6 = -6          | -5.5, -10.5 (-5, -15)    |
# |      8 | 2.5, 13.5         | 8    | 12   | 9: -6 - 7 = -13        | -11.25, -17.75           |
# |     12 | 1.25, 13.75       | 7.5  | 13.5 | finish: -20.125        | -17.1875, -23.4375       |
# | finish | the mean of -17.1875 and -23.4375, and no outer step:     -20.3125, both copies  |
X_LOCAL = (
    [-1.0, -2.0, -3.0, -4.0, -5.5, -6.5, -7.5, -8.5, -11.25, -12.25, -13.25, -14.25, -20.3125],
    [-3.0, -6.0, -9.0, -12.0, -10.5, -13.5, -16.5, -19.5, -17.75, -20.75, -23.75, -26.75]
    + [-20.3125],
)
X_OUTER = [0.0] * 4 + [-6.0] * 4 + [-13.0] * 4 + [-20.3125]
# `y` leaves after steps 6 and 10:
#
# |      6 | 6, 18             | 12   | 12     | 7: 0 - 9 = -9            | -8, -15 (-7, -21)    |
# |     10 | 2, 15             | 8.5  | 14.5   | 11: -9 - 7.875 = -16.875 | -14.4375, -21.9375   |
# | finish | the mean of -15.4375 and -24.9375: -20.1875, both copies                        |
Y_LOCAL = (
    [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -8.0, -9.0, -10.0, -11.0, -14.4375, -15.4375] + [-20.1875],
    [-3.0, -6.0, -9.0, -12.0, -15.0, -18.0, -15.0, -18.0, -21.0, -24.0, -21.9375, -24.9375]
    + [-20.1875],
)
Y_OUTER = [0.0] * 6 + [-9.0] * 4 + [-16.875] * 2 + [-20.1875]


def take_off(rank: int, size: int) -> list[tuple[float, float, float, float]]:
    """Return x, y and their global copies after each of 12 steps and after `finish`."""
    module = Two()
    diloco = start(
        module,
        world(rank, size),
        num_fragments=2,
        fragment_pattern="balanced",
        outer_optimizer=HALF,
    )
    column = []
    for step in range(13):
        if step < 12:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.sub_(1.0 + 2.0 * rank)
            diloco.after_step()
        else:
            diloco.finish()
        outer = [float(fragment.global_copy) for fragment in diloco.fragments]
        column.append((module.x.item(), module.y.item(), *outer))
    return column


def test_two_numbers_by_hand(tmp_path: Path) -> None:
    for rank, column in enumerate(run_ranks(take_off, 2, tmp_path)):
        x, y, outer_x, outer_y = (list(values) for values in zip(*column, strict=True))
        assert x == X_LOCAL[rank]
        assert y == Y_LOCAL[rank]
        assert outer_x == X_OUTER
        assert outer_y == Y_OUTER


# The serial twin


def check_against_twin(size: int, run: Run, folder: Path) -> list[Trace]:
    traces = run_ranks(train, size, folder, run)
    expected = twin(size, run, traces[0].fragments)
    for rank in range(size):
        assert_same_bits(traces[rank], expected[rank], f"rank {rank}")
        for p, tensor in enumerate(traces[0].outer[-1]):
            assert torch.equal(bits(traces[rank].outer[-1][p]), bits(tensor)), "replicas drift"
    return traces


@pytest.mark.parametrize(
    ("wire_dtype", "size"), [("fp32", 3), ("bf16", 2), ("int8", 3), ("fp4", 3)]
)
def test_every_wire_format_equals_the_twin_through_the_wire(
    wire_dtype: str, size: int, tmp_path: Path
) -> None:
    """A fragment per tensor, more than a cycle has steps: a block's scale is that of one tensor."""
    tensors = len(state_of(Net()))
    changes = {"num_fragments": tensors, "fragment_pattern": "balanced", "wire_dtype": wire_dtype}
    traces = check_against_twin(size, Run(14, changes), tmp_path)
    assert [len(names) for names in traces[0].fragments] == [1] * tensors
    exact = twin(size, Run(14, {**changes, "wire_dtype": "fp32"}), traces[0].fragments)[0]
    difference = largest_difference(traces[0].local, exact.local)
    assert (difference == 0.0) == (wire_dtype == "fp32"), "the format leaves its mark"


def test_several_fragments_in_flight_equal_the_twin(tmp_path: Path) -> None:
    """tau > H / P: the next fragment leaves before the last one has landed."""
    changes = {"sync_every": 6, "num_fragments": 3, "overlap_steps": 5}
    traces = check_against_twin(2, Run(16, changes), tmp_path)
    assert max(len(fragments) for fragments in traces[0].in_flight) == 3
    assert traces[0].in_flight == traces[1].in_flight
    assert traces[0].in_flight[-1] == [], "`finish` leaves nothing on its way"
    assert traces[0].in_flight[-2], "`finish` had something to land"


def test_bf16_parameters_equal_the_twin_and_keep_fp32_global_copies(tmp_path: Path) -> None:
    run = Run(14, {"num_fragments": 2}, dtype=torch.bfloat16)
    for trace in check_against_twin(2, run, tmp_path):
        assert {tensor.dtype for state in trace.local for tensor in state.values()} == {run.dtype}
        for copies in trace.outer:
            assert [copy.dtype for copy in copies] == [torch.float32] * 2
        finer = trace.outer[-2][0] != trace.outer[-2][0].to(run.dtype)
        assert finer.any(), "the global copy holds more than bf16 can"


def test_a_landing_one_step_later_would_be_seen(tmp_path: Path) -> None:
    trace = run_ranks(train, 2, tmp_path, Run(8, {"num_fragments": 2}))[0]
    late = twin(2, Run(8, {"num_fragments": 2, "overlap_steps": 2}), trace.fragments)[0]
    assert largest_difference(trace.local[:4], late.local[:4]) == 0.0
    assert largest_difference(trace.local[4:5], late.local[4:5]) > 1e-4


# What must not change the training


def look_and_wait(diloco: StreamingDiLoCo) -> None:
    with diloco.weight_swap.outer_weights():
        pass
    diloco.wait_in_flight()


def test_validation_and_checkpoints_between_steps_change_nothing(tmp_path: Path) -> None:
    run = Run(12, {"overlap_steps": 3, "num_fragments": 2})
    undisturbed = run_ranks(train, 2, tmp_path, run)
    between = Run(run.steps, run.changes, between_steps=look_and_wait)
    disturbed = run_ranks(train, 2, tmp_path, between)
    for rank in range(2):
        assert_same_bits(disturbed[rank], undisturbed[rank], f"rank {rank}")
        assert disturbed[rank].in_flight == undisturbed[rank].in_flight


def test_outer_weights_nest_and_come_off_bit_for_bit() -> None:
    module, diloco = after_some_steps(6, num_fragments=1)
    with torch.no_grad():  # values that arithmetic would not keep
        module.head.weight[0, :3] = torch.tensor([-0.0, math.nan, 1e-42])
    local = all_bits(module)
    with diloco.weight_swap.outer_weights():
        outer = all_bits(module)
        flat = torch.cat([p.detach().flatten() for p in module.parameters()])
        assert torch.equal(flat, diloco.fragments[0].global_copy)
        with diloco.weight_swap.outer_weights():
            assert_equal_states(all_bits(module), outer)
        assert_equal_states(all_bits(module), outer)
    assert_equal_states(all_bits(module), local)
    assert not torch.equal(outer["embed.weight"], local["embed.weight"]), "nothing was exchanged"


def test_outer_weights_come_off_after_an_exception_too() -> None:
    module, diloco = after_some_steps(6)
    local = all_bits(module)
    with pytest.raises(KeyError, match="validation"), diloco.weight_swap.outer_weights():
        raise KeyError("validation")
    assert_equal_states(all_bits(module), local)
    with diloco.weight_swap.outer_weights():  # and can be put on again
        assert not torch.equal(bits(module.embed.weight), local["embed.weight"])
    assert_equal_states(all_bits(module), local)


def test_a_parameter_written_to_in_between_is_refused_and_the_local_copy_is_back() -> None:
    """As a callback does that puts weights of its own in for a validation, and takes them out."""
    module, diloco = after_some_steps(6)
    local = all_bits(module)
    with (
        pytest.raises(RuntimeError, match=r"\['head.weight'\] were modified while the module"),
        diloco.weight_swap.outer_weights(),
        torch.no_grad(),
    ):
        module.head.weight.add_(1.0)
    assert_equal_states(all_bits(module), local)
    diloco.weight_swap.swap_in()
    with torch.no_grad():
        module.head.weight.add_(1.0)
    diloco.weight_swap.swap_out(check=False)
    assert_equal_states(all_bits(module), local)


def test_a_buffer_written_to_in_between_keeps_what_was_written() -> None:
    """A module may count in a buffer during a validation."""
    module = Net()
    module.register_buffer("best", torch.zeros(2))
    diloco = start(module, alone(), num_fragments=1)
    weight = module.head.weight.detach().clone()
    with diloco.weight_swap.outer_weights():
        module.best += 3.0
    assert module.best.tolist() == [3.0, 3.0]
    assert torch.equal(module.head.weight, weight)
