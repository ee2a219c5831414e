"""The mean of the local weights for a validation: right, counted, and nothing is trained on it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_commfree.diloco import (
    DiLoCoSettings,
    StreamingDiLoCo,
    split_into_fragments,
)
from lightning_commfree.diloco.transport import FixedTransport
from tests.diloco.training import (
    ADAMW,
    DEFAULTS,
    Net,
    all_bits,
    alone,
    assert_equal_states,
    backward,
    start,
    state_of,
    world,
)
from tests.world import run_ranks

STEPS = 9
EVALUATED = (2, 5, 8)  # before any launch, between launch and landing, and later


def train(rank: int, size: int, evaluate: bool) -> Any:
    """Return the weights after every step, the local ones and the shown ones, and bytes by tag."""
    module = Net()
    module.register_buffer("mean", torch.zeros(2))
    changes = {"num_fragments": 2, "wire_dtype": "fp4", "overlap_steps": 3}
    settings = DiLoCoSettings(**{**DEFAULTS, **changes})
    channel = world(rank, size)
    fragments = split_into_fragments(module, 2, "strided")
    diloco = StreamingDiLoCo(module, fragments, settings, FixedTransport(channel))
    optimizer = ADAMW(module.parameters())
    trace, seen = [], []
    for step in range(1, STEPS + 1):
        backward(module, rank, step)
        optimizer.step()
        module.mean += rank + 1.0
        diloco.after_step()
        if evaluate and step in EVALUATED:
            before, flying = all_bits(module), diloco.in_flight
            shown = diloco.mean_weights()
            module.mean += 1.0  # as a forward pass without an optimizer step does
            later = diloco.mean_weights()
            module.mean -= 1.0
            changes = [b - a for a, b in zip(shown, later, strict=True)]
            assert torch.cat(changes).sum().item() == module.mean.numel(), "not of the last step"
            with diloco.weight_swap.outer_weights(shown):
                inside = {**state_of(module), "mean": module.mean.clone()}
            assert_equal_states(all_bits(module), before)
            assert diloco.in_flight == flying
            seen.append(({**state_of(module), "mean": module.mean.clone()}, inside))
        trace.append(
            {**all_bits(module), **{str(p): f.digest() for p, f in enumerate(diloco.fragments)}}
        )
    diloco.finish()
    trace.append(all_bits(module))
    diloco.close()
    channel.close()
    return trace, seen, dict(channel.ledger.bytes_by_tag)


def test_the_mean_is_shown_and_changes_nothing(tmp_path: Path) -> None:
    without, ranks = (run_ranks(train, 3, tmp_path, evaluate) for evaluate in (False, True))
    for (trace, seen, sent), (expected, _, sent_without) in zip(ranks, without, strict=True):
        for got, state in zip(trace, expected, strict=True):
            assert_equal_states(got, state)
        for i, (_, shown) in enumerate(seen):
            assert_equal_states(shown, ranks[0][1][i][1])
            for name, tensor in shown.items():
                local = [rank[1][i][0][name] for rank in ranks]
                atol = 1e-6 if name == "mean" else 3e-2
                mean = torch.stack(local).mean(0)
                torch.testing.assert_close(tensor, mean, rtol=1e-5, atol=atol)
        assert sent.pop("evaluation") > 0
        assert sent == sent_without, "under their own tag, and nothing else is sent"
    apart = ranks[0][1][0][0]["head.weight"] - ranks[1][1][0][0]["head.weight"]
    assert apart.abs().max() > 1e-3


def test_one_replica_alone_shows_its_local_weights() -> None:
    module = Net()
    diloco = start(module, alone(), wire_dtype="fp4")
    optimizer = partial(torch.optim.SGD, lr=0.1)(module.parameters())
    for step in range(1, 4):
        backward(module, 0, step)
        optimizer.step()
        diloco.after_step()
    before = all_bits(module)
    with diloco.weight_swap.outer_weights(diloco.mean_weights()):
        assert_equal_states(all_bits(module), before)
    with diloco.weight_swap.outer_weights():
        assert not torch.equal(all_bits(module)["head.weight"], before["head.weight"])
