"""Votes that begin during backward: when buckets leave, and that the result is the same."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.exchange import View
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.lion import DistributedLion, LionSettings, Voting
from tests.lion import training
from tests.lion.threads import in_threads

CHANGED = "changed after its vote was launched.*Pass `overlap=False`"


@pytest.fixture(autouse=True)
def _a_bucket_for_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    training.small_buckets(monkeypatch)


class Net(nn.Module):
    """Six buckets: 0 to 4 are layers 4 to 0, and 5 is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.frozen = nn.Parameter(torch.ones(50), requires_grad=False)
        generator = torch.Generator().manual_seed(3)  # the default one is shared by threads
        for parameter in self.layers.parameters():
            parameter.data.normal_(0.0, 0.4, generator=generator)

    def forward(self, x: Tensor, order: Sequence[int] = range(5)) -> Tensor:
        for i in order:
            x = torch.tanh(self.layers[i](x))
        return (x * self.frozen[:6]).square().sum()


def joined(channel: Any = None) -> tuple[Net, DistributedLion, Voting]:
    net = Net()
    lion = DistributedLion(net.parameters(), lr=0.01, weight_decay=0.1)
    channel = channel or Channel([0], 0, Ledger())
    settings = LionSettings(check_drift_every=2)
    voting = lion.join(list(net.named_parameters()), View.of(channel), settings)
    assert len(voting.buckets) == 6
    return net, lion, voting


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def watch(net: Net, voting: Voting, patch: pytest.MonkeyPatch) -> list[str]:
    """Note in order which layer's gradients come and which bucket leaves."""
    events: list[str] = []
    for i, layer in enumerate(net.layers):
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, i=i: events.append(f"layer {i}"))
    launch: Callable[[int], None] = voting._launch

    def noted(index: int) -> None:
        events.append(f"bucket {index}")
        launch(index)

    patch.setattr(voting, "_launch", noted)
    return events


def test_a_bucket_leaves_as_soon_as_its_last_gradient_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, lion, voting = joined()
    events = watch(net, voting, monkeypatch)
    for step in range(3):
        events.clear()
        with voting.during_backward():
            net(batch(step, 0)).backward()
        expected = []
        for i in reversed(range(5)):
            expected += [f"layer {i}", f"layer {i}", f"bucket {4 - i}"]
        expected.append("bucket 5")  # waits for nothing but its turn
        assert events == expected
        lion.step()
        lion.zero_grad()
        assert events == expected, "nothing was left for the step"
    lion.leave()


ORDERS = ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [0, 1, 2, 3])  # of the three workers


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_result_is_that_of_voting_at_the_step(micro_batches: int) -> None:
    """Workers whose gradients come in other orders, or not at all; accumulated ones, too."""

    def worker(channel: Any, overlap: bool) -> list[dict[str, Tensor]]:
        net, lion, voting = joined(channel)
        seen = []
        for step in range(10):
            lion.zero_grad()
            for micro in range(micro_batches):
                loss = net(batch(step * 10 + micro, channel.rank), ORDERS[channel.rank])
                if overlap and micro == micro_batches - 1:
                    with voting.during_backward():
                        loss.backward()
                else:
                    loss.backward()
                    assert not voting._flights, "only the last one has all of the gradient"
            lion.step()
            seen.append(training.snapshot(dict(net.named_parameters())))
        lion.leave()
        return seen

    plain = in_threads(3, lambda channel: worker(channel, overlap=False))
    during = in_threads(3, lambda channel: worker(channel, overlap=True))
    for steps in (*plain, *during):
        for step, (got, expected) in enumerate(zip(steps, plain[0], strict=True)):
            training.assert_same(got, expected, step)
    assert not torch.equal(plain[0][-1]["layers.4.weight"], plain[0][0]["layers.4.weight"])
    assert torch.equal(plain[0][-1]["frozen"], torch.ones(50))


def test_the_optimizer_may_step_inside() -> None:
    """As Lightning does: forward and backward run in the closure of the step."""
    net, lion, voting = joined()
    twin, twin_lion, _ = joined()
    for step in range(3):
        lion.zero_grad()
        with voting.during_backward():

            def closure(step: int = step) -> Tensor:
                loss = net(batch(step, 0))
                loss.backward()
                assert len(voting._flights) == 6
                return loss

            lion.step(closure)
        twin_lion.zero_grad()
        twin(batch(step, 0)).backward()
        twin_lion.step()
        training.assert_same(dict(net.state_dict()), dict(twin.state_dict()), step)
    lion.leave()
    twin_lion.leave()


# What writes to gradients after their vote


def backward_again(net: Net) -> None:
    net(batch(9, 0)).backward()


def clip_norm(net: Net) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)


def replace(net: Net) -> None:
    weight = net.layers[0].weight
    weight.grad = weight.grad * 0.5


def forget(net: Net) -> None:
    net.layers[0].weight.grad = None


def write_one(net: Net) -> None:
    net.layers[2].bias.grad[0] = 0.0


@pytest.mark.parametrize("meddle", [backward_again, clip_norm, replace, forget, write_one])
def test_a_gradient_that_changes_after_its_vote_ends_the_step(
    meddle: Callable[[Net], None],
) -> None:
    def worker(channel: Any) -> None:
        net, lion, voting = joined(channel)
        with voting.during_backward():
            net(batch(0, channel.rank)).backward()
            meddle(net)
        before = training.snapshot(dict(net.named_parameters()))
        with pytest.raises(RuntimeError, match=CHANGED):
            lion.step()
        training.assert_same(training.snapshot(dict(net.named_parameters())), before)
        # who catches it goes on: the votes of that step are over on all workers
        lion.zero_grad()
        net(batch(1, channel.rank)).backward()
        lion.step()
        assert not torch.equal(net.layers[0].weight, before["layers.0.weight"])
        lion.leave()

    in_threads(2, worker)


def test_no_later_gradient_can_be_taken_for_the_voted_one() -> None:
    """A second backward after `zero_grad` may allocate where the first one had: while the voted
    gradient lives, nothing else has its address."""
    net, lion, voting = joined()
    with voting.during_backward():
        net(batch(0, 0)).backward()
        voted = weakref.ref(net.layers[0].weight.grad)
        lion.zero_grad()
    assert voted() is not None
    with pytest.raises(RuntimeError, match=CHANGED):
        lion.step()
    lion.leave()


def test_gradients_of_two_devices_send_a_bucket_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd has a thread for each: a bucket left again while its launch was under way."""
    _, _, voting = joined()
    launched: list[int] = []

    def launch(self: Voting, index: int) -> None:
        launched.append(index)
        time.sleep(0.1)
        self._flights.append(cast(Any, None))

    monkeypatch.setattr(Voting, "_launch", launch)
    voting._awaited = [set(bucket.parameters[:1]) for bucket in voting.buckets[:2]]
    voting._awaited += [set(bucket.parameters) for bucket in voting.buckets[2:]]
    ready = [bucket.parameters[0] for bucket in voting.buckets[:2]]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(voting._gradient_ready, ready))
    assert launched == [0, 1]


def test_no_hook_outlives_the_joining() -> None:
    """Whether by leaving or by joining anew; a second joining begins with no vote under way."""
    net, lion, voting = joined()
    with voting.during_backward():
        net(batch(0, 0)).backward()
    lion.step()
    with voting.during_backward():
        again = lion.join(list(net.named_parameters()), voting.view, LionSettings())
        with again.during_backward():
            net(batch(1, 0)).backward()
    assert not voting._flights
    assert len(again._flights) == 6
    lion.step()
    with again.during_backward():
        lion.leave()
        net(batch(2, 0)).backward()
    assert not again._flights
