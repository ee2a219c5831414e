"""An exchange in another view: a flight whose members are lost is launched again by the others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_commfree.comm.channel import Pending
from lightning_commfree.comm.exchange import FixedMembership, View
from lightning_commfree.diloco import CODECS, StreamingDiLoCo, split_into_fragments
from lightning_commfree.diloco.exchange import Flight, Header, cheaper_exchange
from lightning_commfree.diloco.settings import DiLoCoSettings
from tests.diloco.training import DEFAULTS, Net, alone, state_of
from tests.lion.threads import ThreadChannel, in_threads

NUMEL = 3000
CPU = torch.device("cpu")


class Broken(ThreadChannel):
    """A channel on which a member was lost after everything had been sent."""

    def all_gather(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        del tensor, tag

        def fail() -> Tensor:
            raise RuntimeError("rank 2 is gone")

        return Pending(fail)

    all_to_all = all_gather


class Shrinking:
    """Three replicas, of which the last is lost with the first exchange."""

    changes = True

    def __init__(self, table: Any, channel: ThreadChannel) -> None:
        self.views = [
            View(0, (0, 1, 2), Broken(table, channel.rank, range(3))),
            View(1, (0, 1), channel),
        ]
        self.views[0].channel.size = 3
        self.failures: list[str] = []

    def view(self) -> View:
        return self.views[0]

    def after_failure(self, view: View, error: RuntimeError) -> View:
        self.failures.append(f"view {view.number}: {error}")
        return self.views[1]

    def leave(self) -> None:
        pass


def gradient(rank: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("name", ["fp32", "fp4", "int2", "topk"])
def test_a_flight_launched_again_equals_one_in_the_new_view(name: str) -> None:
    """In three it would go in two phases; in two it is gathered, so fp4 has other blocks."""

    def replica(channel: ThreadChannel) -> tuple[bool, bool, Tensor, Tensor]:
        broken = Broken(channel._table, channel.rank, range(3))
        broken.size = 3
        many, few = View(0, (0, 1, 2), broken), View(1, (0, 1), channel)
        codec, values = CODECS[name], gradient(channel.rank)
        before, after = cheaper_exchange(many, codec, NUMEL), cheaper_exchange(few, codec, NUMEL)

        residual, direct_residual = torch.zeros(NUMEL), torch.zeros(NUMEL)
        header = Header(stop=False, step=1, digest=0)
        flight = Flight.launch(before, values, header, residual, keep=True)
        with pytest.raises(RuntimeError, match="rank 2 is gone"):
            flight.pending.wait()
        again = flight.relaunch(after).receive(CPU, None)
        direct = Flight.launch(after, values, header, direct_residual).receive(CPU, None)
        assert torch.equal(residual, direct_residual), "filled anew, and not added to"
        assert (residual.abs().sum() > 0) == (name != "fp32")
        return before.route.two_phase, after.route.two_phase, again.mean, direct.mean

    for routes_and_means in in_threads(2, replica):
        three, two, again, direct = routes_and_means
        assert (three, two) == (name != "topk", False)
        assert torch.equal(again, direct)


def test_values_are_not_kept_where_members_stay() -> None:
    exchange = cheaper_exchange(View.of(alone()), CODECS["fp32"], NUMEL)
    flight = Flight.launch(exchange, gradient(0), Header(stop=False, step=1, digest=0))
    assert flight.values is None
    with pytest.raises(AssertionError, match="values are kept only if members may change"):
        flight.relaunch(exchange)


def settings(**changes: Any) -> DiLoCoSettings:
    return DiLoCoSettings(**{**DEFAULTS, "num_fragments": 2, **changes})


NET = Net()  # not made in the threads, which share the random numbers


def play(channel: ThreadChannel, membership: Any, wire: str) -> dict[str, Tensor]:
    module = copy.deepcopy(NET)
    fragments = split_into_fragments(module, 2, "strided")
    diloco = StreamingDiLoCo(module, fragments, settings(wire_dtype=wire), membership)
    for step in range(1, 12):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.01 * (channel.rank + 1) * step)
        diloco.after_step()
    diloco.finish()
    assert diloco.view.number == (1 if membership.changes else 0)
    diloco.close()
    return state_of(module)


@pytest.mark.parametrize("wire", ["fp32", "int2", "topk"])
def test_a_run_that_loses_a_member_continues_in_the_next_view(wire: str) -> None:
    """The first flight is lost and sent again by two: from there on all is as if there were two.

    With error feedback too: the residual is added to what is sent once, and not again.
    """
    expected = in_threads(2, lambda channel: play(channel, FixedMembership(channel), wire))

    def replica(channel: ThreadChannel) -> tuple[dict[str, Tensor], list[str]]:
        membership = Shrinking(channel._table, channel)
        return play(channel, membership, wire), membership.failures

    for (state, failures), wanted in zip(in_threads(2, replica), expected, strict=True):
        assert failures[0] == "view 0: rank 2 is gone"
        assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())


def test_a_fixed_membership_raises_the_error_as_it_is() -> None:
    membership, error = FixedMembership(alone()), RuntimeError("rank 1 is gone")
    with pytest.raises(RuntimeError) as raised:
        membership.after_failure(membership.view(), error)
    assert raised.value is error
