"""Balanced fragments, what cannot be split, and the partition property on random module trees."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_commfree.diloco.fragments import PATTERNS, Fragment, split_into_fragments
from tests.diloco.models import Block, assert_partition, gpt2


def bytes_of(module: nn.Module, fragment: Fragment) -> int:
    return sum(module.get_parameter(name).nbytes for name in fragment.parameters)


# Balanced


@pytest.mark.parametrize("num_fragments", [2, 3, 5, 8])
def test_balanced_bytes_differ_by_the_largest_tensor_at_most(num_fragments: int) -> None:
    model = gpt2(5).to(torch.bfloat16)
    model.transformer.wpe.to(torch.float32)  # bytes count, not elements
    fragments = split_into_fragments(model, num_fragments, "balanced")
    sizes = [bytes_of(model, fragment) for fragment in fragments]
    assert max(sizes) - min(sizes) <= max(p.nbytes for p in model.parameters())
    assert_partition(model, fragments)

    by_count = [0] * num_fragments  # the likely mistake: in turn, whatever the size
    for i, parameter in enumerate(model.parameters()):
        by_count[i % num_fragments] += parameter.nbytes
    assert max(sizes) - min(sizes) < max(by_count) - min(by_count)


def test_balanced_by_hand() -> None:
    """16, 12, 8, 4, 4 bytes to two fragments: 16 | 12, then 8 to the second, 4 and 4 to the first.

    Within a fragment the tensors are in the order of the model.
    """
    model = nn.ParameterList(torch.ones(numel) for numel in (1, 1, 3, 2, 4))
    first, second = split_into_fragments(model, 2, "balanced")
    assert first.parameters == ("0", "1", "4")
    assert second.parameters == ("2", "3")


@pytest.mark.parametrize(("tensors", "num_fragments"), [(1, 1), (3, 3), (9, 4)])
def test_balanced_without_blocks_makes_four_fragments_at_most(
    tensors: int, num_fragments: int
) -> None:
    model = nn.ParameterList(torch.ones(i + 1) for i in range(tensors))
    assert len(split_into_fragments(model, None, "balanced")) == num_fragments


def test_a_tensor_without_elements_leaves_no_fragment_empty() -> None:
    model = nn.ParameterList([torch.empty(0), torch.empty(0), torch.ones(2)])
    assert_partition(model, split_into_fragments(model, 3, "balanced"))


# Refusals


def test_nothing_to_train_is_refused() -> None:
    message = r"no trainable parameters.*Set `requires_grad=True` on some"
    for module in (nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)):
        with pytest.raises(ValueError, match=message):
            split_into_fragments(module, None, "strided")


def test_complex_parameters_are_refused() -> None:
    module = nn.Linear(2, 2, dtype=torch.complex64)
    message = r"'weight' has dtype torch\.complex64.*real floating-point.*`requires_grad=False`"
    with pytest.raises(ValueError, match=message):
        split_into_fragments(module, None, "strided")
    module.requires_grad_(False)
    module.real = nn.Linear(2, 2)
    split_into_fragments(module, None, "strided")


def test_two_parameters_over_one_memory_are_refused() -> None:
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    module[1].weight = nn.Parameter(module[0].weight.data)
    message = r"'0\.weight' and '1\.weight' share memory.*module_b\.weight = module_a\.weight"
    with pytest.raises(ValueError, match=message):
        split_into_fragments(module, None, "strided")


@pytest.mark.parametrize("pattern", ["strided", "sequential"])
def test_more_fragments_than_blocks_and_the_rest_are_refused(pattern: str) -> None:
    assert len(split_into_fragments(gpt2(3), 4, pattern)) == 4
    message = (
        rf"`num_fragments=5` is too large .* `fragment_pattern='{pattern}'`: it has 3 blocks and"
        r" other parameters, so the maximum is 4\. Lower `num_fragments`, or use"
        r" `fragment_pattern='balanced'`"
    )
    with pytest.raises(ValueError, match=message):
        split_into_fragments(gpt2(3), 5, pattern)


def test_more_balanced_fragments_than_tensors_are_refused() -> None:
    assert len(split_into_fragments(nn.Linear(2, 2), 2, "balanced")) == 2
    message = r"`num_fragments=3` .*: it has 2 trainable tensors\. Choose at most 2\."
    with pytest.raises(ValueError, match=message):
        split_into_fragments(nn.Linear(2, 2), 3, "balanced")


# Any module


LEAVES = st.sampled_from(
    [
        lambda: nn.Linear(2, 3),
        lambda: nn.Linear(3, 3, bias=False),
        lambda: nn.BatchNorm1d(3),
        lambda: nn.BatchNorm1d(2, affine=False),
        Block,
        nn.ReLU,
    ]
)


def tree_of(children: st.SearchStrategy[nn.Module]) -> st.SearchStrategy[nn.Module]:
    several = st.lists(children, max_size=4)
    return st.one_of(
        several.map(nn.ModuleList),
        several.map(lambda modules: nn.Sequential(*modules)),
        several.map(lambda modules: nn.ModuleDict({f"m{i}": m for i, m in enumerate(modules)})),
        st.builds(
            lambda make, n: nn.ModuleList(make() for _ in range(n)), LEAVES, st.integers(2, 5)
        ),
    )


TREES = st.recursive(LEAVES.map(lambda make: make()), tree_of, max_leaves=8)


@settings(max_examples=80, deadline=None)
@given(
    module=TREES,
    pattern=st.sampled_from(PATTERNS),
    num_fragments=st.none() | st.integers(1, 6),
    choices=st.randoms(use_true_random=False),
)
def test_fragments_of_any_module_partition_it_or_are_refused(
    module: nn.Module, pattern: str, num_fragments: int | None, choices: Random
) -> None:
    freeze_and_tie(module, choices)
    trainable = [p for p in module.parameters() if p.requires_grad]
    try:
        fragments = split_into_fragments(module, num_fragments, pattern)
    except ValueError:
        assert not trainable or num_fragments not in (None, 1), "these fit what can be trained"
        assert pattern != "balanced" or (num_fragments or 1) > len(trainable)
        return
    assert num_fragments in (None, len(fragments))
    assert_partition(module, fragments)
    assert fragments == split_into_fragments(module, num_fragments, pattern)


def freeze_and_tie(module: nn.Module, choices: Random) -> None:
    linears = [m for m in module.modules() if isinstance(m, nn.Linear)]
    for linear in linears:
        if choices.random() < 0.3:
            twin = choices.choice(linears)
            if twin.weight.shape == linear.weight.shape:
                linear.weight = twin.weight
    for parameter in module.parameters():
        parameter.requires_grad_(choices.random() < 0.8)
