"""Both ways of forming the mean: the same values on all ranks, the bytes that are foretold."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_commfree.comm.background import Background
from lightning_commfree.comm.exchange import View, routes
from lightning_commfree.comm.requests import STOP
from lightning_commfree.diloco import codec as wire_module
from lightning_commfree.diloco.codec import BLOCK, CODECS
from lightning_commfree.diloco.exchange import (
    FragmentExchange,
    Header,
    cheaper_exchange,
    fragment_exchanges,
    mean_cosine,
)
from tests.diloco.training import (
    NESTEROV,
    Net,
    after_some_steps,
    alone,
    start,
    through,
    world,
)
from tests.world import run_ranks

CPU = torch.device("cpu")
UNEQUAL = 3, 1, 0, 5  # weights of the ranks
NUMEL = 5000  # no multiple of a block times the ranks


def gradient(rank: int) -> Tensor:
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))
    return values * (1.0 + rank)


def exchange_both(rank: int, size: int, from_device: bool, weights: tuple[int, ...]) -> Any:
    channel = world(rank, size)
    if from_device:  # by another name, so that values are elsewhere than the channel wants them
        channel.device = torch.device("cpu", 0)
    background = Background(channel.ledger)
    outcomes = {}
    for name, wire in CODECS.items():
        ways = [
            FragmentExchange(route, wire, NUMEL, 0, background)
            for route in routes(View.of(channel))
        ]
        for way in ways:
            before = channel.ledger.bytes_sent
            digest = 5 if name != "bf16" else 5 + rank
            header = Header(STOP * (rank == 1), step=7, digest=digest, weight=weights[rank])
            arrived = way.launch(gradient(rank), header, device=CPU).wait()
            sent = channel.ledger.bytes_sent - before
            assert (arrived.decoded is not None) == from_device, "by the thread, on arrival"
            arrival = way.decode(arrived, CPU)
            outcomes[name, way.route.two_phase] = (
                arrival,
                mean_cosine(arrival.norms, arrival.summary.counted_weights),
                float(arrival.norms[-1].sqrt()),
                sent,
                way.num_bytes,
            )
    outcomes["cheaper"] = [
        cheaper_exchange(View.of(channel), CODECS[name], NUMEL).route.two_phase
        for name in ("fp4", "int2")
    ]
    for other_step in ways:
        late = other_step.launch(gradient(rank), Header(0, 7 + rank, 0)).wait()
        outcomes["late", other_step.route.two_phase] = other_step.decode(late, CPU).summary
    background.close()
    channel.close()
    return outcomes


def in_shards(name: str, size: int, values: Tensor) -> Tensor:
    """Send each shard through the wire by itself: whole blocks, padded with zeros at the end."""
    shard = -(-NUMEL // (size * BLOCK)) * BLOCK
    rows = torch.nn.functional.pad(values, (0, size * shard - NUMEL)).view(size, shard)
    return torch.cat([through(name)(row) for row in rows])[:NUMEL]


@pytest.mark.parametrize(
    ("size", "from_device", "piece", "weights"),
    [
        (2, False, None, (1,) * 2),
        (4, False, BLOCK, (7,) * 4),
        (3, True, None, (0,) * 3),
        (2, False, None, UNEQUAL),
        (4, False, BLOCK, UNEQUAL),
    ],
)
def test_means_flags_and_bytes(
    size: int,
    from_device: bool,
    piece: int | None,
    weights: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if piece is not None:
        monkeypatch.setattr(wire_module, "_CPU_CHUNK", piece)  # the ranks are forked
    ranks = run_ranks(exchange_both, size, tmp_path, from_device, weights)
    counted = [rank for rank in range(size) if weights[rank]] or [*range(size)]
    equal = len(set(weights)) == 1
    shares = [1 if equal else weights[rank] / sum(weights[:size]) for rank in counted]
    for name in CODECS:
        for way in (False, True):
            transfer = partial(in_shards, name, size) if way else through(name)
            sent = torch.stack([transfer(gradient(rank)) for rank in counted])
            mean = torch.zeros(NUMEL)
            for share, row in zip(shares, sent, strict=True):
                mean += row * share
            mean /= size if equal else 1
            expected = transfer(mean) if way else mean
            products, lengths = sent @ sent.T, sent.norm(dim=1)
            pairs = torch.outer(torch.tensor(shares), torch.tensor(shares)).triu(diagonal=1)
            similar = (pairs * products).sum() / (pairs * torch.outer(lengths, lengths)).sum()
            for outcomes in ranks:
                arrival, cosine, norm, num_bytes, foretold = outcomes[name, way]
                assert torch.equal(arrival.mean, expected), (name, way)
                assert arrival.summary.requests == STOP
                assert arrival.summary.drifted is (name == "bf16")
                assert not arrival.summary.steps_differ
                assert cosine == pytest.approx(float(similar), abs=1e-5)
                assert norm == pytest.approx(float(mean.norm()), rel=1e-5)
                if not equal:
                    assert norm != pytest.approx(float(sent.mean(dim=0).norm()), rel=0.1)
                assert num_bytes == foretold
    for outcomes in ranks:
        for way in (False, True):
            late = outcomes["late", way]
            assert (late.requests, late.drifted, late.steps_differ) == (0, False, True)
            assert [step for step, _ in late.positions] == [7 + rank for rank in range(size)]
        assert outcomes["cheaper"] == [size > 2, size > 2]


def exchange_two_sizes(rank: int, size: int, late: int) -> Any:
    channel = world(rank, size)
    background = Background(channel.ledger)
    sizes = (NUMEL, 100)
    every = [(n, 0) for n in sizes]
    [ways] = fragment_exchanges(View.of(channel), [CODECS["fp32"]], every, background)
    assert [way.route.two_phase for way in ways] == [True, False]
    if rank == late:
        background.submit(lambda: time.sleep(0.3), "late")
    sent = [gradient(rank)[:n] for n in sizes]
    pendings = [way.launch(values, Header(0, 7, 0)) for way, values in zip(ways, sent, strict=True)]
    arrivals = [
        way.decode(pending.wait(), CPU) for way, pending in zip(ways, pendings, strict=True)
    ]
    background.close()
    channel.close()
    return [arrival.mean for arrival in arrivals]


def test_fragments_in_flight_by_both_ways_do_not_change_places(tmp_path: Path) -> None:
    """The thread of one rank starts late: what the training thread sent itself would pass it."""
    for means in run_ranks(exchange_two_sizes, 3, tmp_path, 1):
        for mean in means:
            sent = torch.stack([gradient(rank)[: len(mean)] for rank in range(3)])
            torch.testing.assert_close(mean, sent.mean(0))


def test_small_fragments_are_gathered() -> None:
    """A shard is at least a block, so that padding would cost more than it saves."""
    channel = alone()
    channel.size = 8  # the formulas ask for nothing else
    choose = partial(cheaper_exchange, View.of(channel), CODECS["fp4"])
    assert not choose(100).route.two_phase
    assert choose(100_000).route.two_phase


def drifting(rank: int, size: int, every: int) -> str:
    module = Net()
    changes = {"num_fragments": 2, "sync_every": 4, "check_drift_every": every}
    diloco = start(module, world(rank, size), **changes)
    try:
        for step in range(1, 20):
            if step == 6 and rank == 1:
                with torch.no_grad():
                    diloco.fragments[1].global_copy[3] += 1e-6
            diloco.after_step()
    except RuntimeError as error:
        return f"{diloco.step}: {error}"
    return "no error"


@pytest.mark.parametrize(("every", "found_after"), [(1, 7), (2, 11)])
def test_drift_ends_the_run_on_all_ranks(every: int, found_after: int, tmp_path: Path) -> None:
    """Fragment 1 leaves after steps 6, 10, ...; every second cycle is its second one, step 10."""
    for text in run_ranks(drifting, 3, tmp_path, every):
        assert text.startswith(f"{found_after}: The replicas' global copies of fragment 1 differ")
        assert "embed.weight" in text


def test_drift_is_not_looked_for_when_it_is_switched_off(tmp_path: Path) -> None:
    assert run_ranks(drifting, 2, tmp_path, 0) == ["no error"] * 2


def test_a_scheduler_of_the_outer_learning_rate() -> None:
    def factory(parameters: Any) -> Any:
        optimizer = NESTEROV(parameters)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    _, diloco = after_some_steps(10, num_fragments=1, sync_every=4, outer_optimizer=factory)
    assert [landing.outer_lr for landing in diloco.landings.values()] == [0.35]
    assert diloco.fragments[0].optimizer.param_groups[0]["lr"] == pytest.approx(0.7 / 4)
    state = diloco.state_dict()
    other = start(Net(), alone(), num_fragments=1, sync_every=4, outer_optimizer=factory)
    other.load_state_dict(*state)
    assert other.fragments[0].optimizer.param_groups[0]["lr"] == pytest.approx(0.7 / 4)
    assert other.fragments[0].scheduler.last_epoch == 2


@pytest.mark.parametrize("outer_device", [None, "cpu"])
def test_the_outer_state_takes_8_bytes_a_parameter(outer_device: str | None) -> None:
    module, diloco = after_some_steps(8, sync_every=4, outer_device=outer_device)
    numel = sum(p.numel() for p in module.parameters())
    held = 0
    for fragment in diloco.fragments:
        tensors = [fragment.global_copy]
        for state in fragment.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        held += sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        assert all(tensor.dtype == torch.float32 for tensor in tensors)
    assert held == 8 * numel


@pytest.mark.gpu
def test_the_outer_state_can_live_in_pinned_host_memory() -> None:
    traces = []
    for outer_device in (None, "cpu"):
        module = Net().cuda()
        diloco = start(module, alone(), sync_every=2, outer_device=outer_device)
        for _ in range(6):
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(0.9)
            diloco.after_step()
        copies = [fragment.global_copy for fragment in diloco.fragments]
        assert all(copy.is_pinned() is (outer_device == "cpu") for copy in copies)
        traces.append([parameter.detach().cpu() for parameter in module.parameters()])
    for one, other in zip(*traces, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("outer_device", [None, "cpu"])
def test_a_launch_on_a_gpu_is_not_waited_for(outer_device: str | None) -> None:
    module = Net().cuda()
    diloco = start(module, alone(), sync_every=2, overlap_steps=1, outer_device=outer_device)
    for step in range(1, 8):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.9)
        if not diloco.schedule.landed_at(step):  # a landing reads norms
            torch.cuda.set_sync_debug_mode("error")
        try:
            diloco.after_step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert diloco.landings
