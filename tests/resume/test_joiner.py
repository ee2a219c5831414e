"""A replica that joins others gets their shared state alone."""

from __future__ import annotations

from copy import deepcopy

import torch

from tests.diloco.training import Net, after_some_steps, alone, start


def test_the_shared_state_is_enough_to_join() -> None:
    settings = {"num_fragments": 2, "sync_every": 4, "overlap_steps": 2}
    _, diloco = after_some_steps(11, **settings)
    shared, own = deepcopy(diloco.state_dict())
    assert own["in_flight"], "or there is nothing that the joiner lacks"
    module = Net()
    joiner = start(module, alone(), **settings)
    joiner.load_state_dict(shared, None)
    assert joiner.step == diloco.step
    assert joiner.in_flight == []
    assert joiner.weight_swap.local_equals_shared(), "its local weights are the global ones"
    for mine, theirs in zip(joiner.fragments, diloco.fragments, strict=True):
        assert torch.equal(mine.global_copy, theirs.global_copy)
        states = [one.optimizer.state_dict()["state"] for one in (mine, theirs)]
        torch.testing.assert_close(*states, rtol=0, atol=0)
    for _ in range(12):  # it trains on; the fragments of its first cycle land
        for parameter in module.parameters():
            parameter.data.add_(0.01)
        joiner.after_step()
    assert joiner.step == diloco.step + 12
