"""Four collectives on real gloo ranks against arithmetic; pendings; groups that are parts."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.comm.job import (
    DATA,
    REPLICA,
    TENSOR,
    Mesh,
    RankInfo,
    ReplicaChannels,
)
from lightning_commfree.comm.ledger import START, STEPS, Ledger, LedgerTotals
from tests.world import run_ranks

SIZES = [2, 3]
COLLECTIVES = ["all_reduce", "all_gather", "all_to_all", "broadcast"]


def opened(*args: Any, **kwargs: Any) -> Channel:
    """Open a channel with an empty ledger: what its opening sent is not what is tested here."""
    channel = Channel.open(*args, **kwargs)
    for counts in (channel.ledger.bytes_by_tag, channel.ledger.seconds_by_tag):
        counts.clear()
    channel.ledger.collectives_by_tag.clear()
    return channel


def world_channel(rank: int, size: int, full_duplex: bool = False) -> Channel:
    return opened([list(range(size))], rank, Ledger(), full_duplex=full_duplex)


def of_rank(rank: int, *shape: int) -> Tensor:
    """Whole numbers that tell where they are from, so that sums are exact in any order."""
    numel = torch.Size(shape).numel()
    return (torch.arange(numel, dtype=torch.float32) + 1000.0 * (rank + 1)).view(shape)


# Against arithmetic


def exchange(rank: int, size: int, full_duplex: bool) -> dict[str, Any]:
    channel = world_channel(rank, size, full_duplex)
    reduced, overwritten = of_rank(rank, 4, 5), of_rank(rank, 3)
    transposed = of_rank(rank, 2, 5).T
    columns = of_rank(rank, 2, size).T
    return {
        "all_reduce": channel.all_reduce(reduced, "t").wait(),
        "all_reduce in place": reduced,
        "all_gather": channel.all_gather(of_rank(rank, 4, 5), "t").wait(),
        "all_gather bytes": channel.all_gather(of_rank(rank, 7).to(torch.uint8), "t").wait(),
        "all_gather of a number": channel.all_gather(torch.tensor(float(rank)), "t").wait(),
        "all_gather of nothing": channel.all_gather(torch.empty(0), "t").wait(),
        "all_gather transposed": channel.all_gather(transposed, "t").wait(),
        "all_to_all": channel.all_to_all(of_rank(rank, size, 3), "t").wait(),
        "all_to_all transposed": channel.all_to_all(columns, "t").wait(),
        "broadcast": channel.broadcast(of_rank(rank, 3), "t").wait(),
        "broadcast from the last": channel.broadcast(overwritten, "t", size - 1).wait(),
        "broadcast in place": overwritten,
    }


def expected_exchange(rank: int, size: int) -> dict[str, Tensor]:
    total = torch.stack([of_rank(r, 4, 5) for r in range(size)]).sum(0)
    last = of_rank(size - 1, 3)
    return {
        "all_reduce": total,
        "all_reduce in place": total,
        "all_gather": torch.stack([of_rank(r, 4, 5) for r in range(size)]),
        "all_gather bytes": torch.stack([of_rank(r, 7).to(torch.uint8) for r in range(size)]),
        "all_gather of a number": torch.arange(size, dtype=torch.float32),
        "all_gather of nothing": torch.empty(size, 0),
        "all_gather transposed": torch.stack([of_rank(r, 2, 5).T for r in range(size)]),
        "all_to_all": torch.stack([of_rank(r, size, 3)[rank] for r in range(size)]),
        "all_to_all transposed": torch.stack([of_rank(r, 2, size).T[rank] for r in range(size)]),
        "broadcast": of_rank(0, 3),
        "broadcast from the last": last,
        "broadcast in place": last,
    }


@pytest.mark.parametrize("full_duplex", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_every_collective_is_what_arithmetic_says(
    size: int, full_duplex: bool, tmp_path: Path
) -> None:
    for rank, results in enumerate(run_ranks(exchange, size, tmp_path, full_duplex)):
        expected = expected_exchange(rank, size)
        assert results.keys() == expected.keys()
        for name, tensor in expected.items():
            assert results[name].dtype == tensor.dtype, name
            assert torch.equal(results[name], tensor), f"{name} on rank {rank}"


# Pendings


def launch_all_then_wait(
    rank: int, size: int, order: list[int], full_duplex: bool
) -> tuple[list[Tensor], Any]:
    """Launch six collectives, wait in `order`; return the results in the order of the launches."""
    channel = world_channel(rank, size, full_duplex)
    pendings = [
        channel.all_reduce(of_rank(rank, 100_000), "large"),
        channel.all_gather(of_rank(rank, 3), "small"),
        channel.all_to_all(of_rank(rank, size, 50_000), "large"),
        channel.broadcast(of_rank(rank, 3), "small"),
        channel.all_reduce(of_rank(rank, 3), "small"),
        channel.all_gather(of_rank(rank, 50_000), "large"),
    ]
    launched = channel.ledger.totals()
    assert launched.seconds_waited == 0.0, "a launch is no wait"
    by_launch = {i: pendings[i].wait() for i in order}
    assert channel.ledger.totals().bytes_sent == launched.bytes_sent, "bytes count at the launch"
    return [by_launch[i] for i in range(len(pendings))], channel.ledger.seconds_by_tag


@pytest.mark.parametrize("full_duplex", [False, True])
@pytest.mark.parametrize("order", [[2, 5, 0, 3, 1, 4]])
def test_pendings_may_be_waited_for_in_any_order(
    order: list[int], full_duplex: bool, tmp_path: Path
) -> None:
    size = 3
    for rank, (results, seconds) in enumerate(
        run_ranks(launch_all_then_wait, size, tmp_path, order, full_duplex)
    ):
        expected = [
            sum(of_rank(r, 100_000) for r in range(size)),
            torch.stack([of_rank(r, 3) for r in range(size)]),
            torch.stack([of_rank(r, size, 50_000)[rank] for r in range(size)]),
            of_rank(0, 3),
            sum(of_rank(r, 3) for r in range(size)),
            torch.stack([of_rank(r, 50_000) for r in range(size)]),
        ]
        for i, (got, want) in enumerate(zip(results, expected, strict=True)):
            assert torch.equal(got, want), f"launch {i} on rank {rank}"
        assert set(seconds) == {"large", "small"}


def test_then_chains_and_shares_the_one_transfer() -> None:
    resolved = []
    pending = Pending(lambda: resolved.append("transfer") or 3)
    doubled, squared = pending.then(lambda x: 2 * x), pending.then(lambda x: x * x)
    assert (squared.wait(), doubled.then(str).wait(), pending.wait()) == (9, "6", 3)
    assert resolved == ["transfer"]


def test_a_second_wait_counts_no_second() -> None:
    """Time counts inside of the transfer's wait alone: a result that is here costs nothing."""
    ledger = Ledger()

    class Work:
        def wait(self) -> None:
            time.sleep(0.01)

    channel = Channel([0], 0, ledger)
    pending = channel._pending([Work()], torch.ones(1), "t")
    pending.wait()
    first = ledger.seconds_waited
    assert first >= 0.01
    pending.wait()
    assert ledger.seconds_waited == first


# One rank alone, and parts of the world


@pytest.mark.parametrize("name", COLLECTIVES)
def test_one_rank_gets_its_own_tensor_back_and_sends_nothing(name: str) -> None:
    channel = opened([[0]], 0, Ledger())  # needs no process group, so none is initialized
    tensor = of_rank(0, 1, 3)
    result = getattr(channel, name)(tensor, "t").wait()
    assert torch.equal(result, of_rank(0, 1, 1, 3) if name == "all_gather" else of_rank(0, 1, 3))
    assert result.data_ptr() == tensor.data_ptr(), "nothing is copied"
    if name != "all_gather":  # which has a dimension more
        assert result is tensor
    assert channel.ledger.totals() == LedgerTotals(0, 0.0, 0)
    channel.close()


def talk_along_two_axes(rank: int, size: int) -> dict[str, Any]:
    mesh = Mesh((REPLICA, DATA), (2, 2))
    ledger = Ledger()
    replicas = opened(mesh.groups(REPLICA), rank, ledger, full_duplex=True)
    data = opened(mesh.groups(DATA), rank, ledger)
    mine = torch.tensor([float(rank)])
    in_flight = [replicas.all_gather(mine, REPLICA), data.all_gather(mine, DATA)]
    results = {
        "ranks": [replicas.ranks, data.ranks],
        "place": [replicas.rank, data.rank],
        "gathered": [pending.wait().flatten().tolist() for pending in in_flight],
        "last": data.broadcast(mine.clone(), DATA, source=1).wait().tolist(),
        "bytes": dict(ledger.bytes_by_tag),
    }
    replicas.close()
    results["after one is closed"] = data.all_reduce(mine.clone(), DATA).wait().tolist()
    freed: list[bool] = []
    assert data.group is not None
    weakref.finalize(data.group, freed.append, True)
    data.close()
    results["freed"] = freed
    return results


def test_two_axes_of_four_ranks(tmp_path: Path) -> None:
    """Rank r stands in row r // 2, column r % 2; `source` counts within the group."""
    for rank, result in enumerate(run_ranks(talk_along_two_axes, 4, tmp_path)):
        row, column = divmod(rank, 2)
        columns, rows = (column, column + 2), (2 * row, 2 * row + 1)
        assert result == {
            "ranks": [columns, rows],
            "place": [row, column],
            "gathered": [list(columns), list(rows)],
            "last": [rows[1]],
            "bytes": {REPLICA: 4, DATA: 4 + 2},
            "after one is closed": [sum(rows)],
            "freed": [True],  # though the channel is there: see `Channel.close`
        }


def gather_in_groups(rank: int, size: int, groups: list[list[int]]) -> Any:
    channel = opened(groups, rank, Ledger())
    gathered = channel.all_gather(torch.tensor(float(rank)), "t").wait()
    return gathered.tolist(), list(channel.ranks), channel.rank, channel.ledger.bytes_sent


def test_groups_may_differ_in_size_and_a_single_rank_is_one(tmp_path: Path) -> None:
    assert run_ranks(gather_in_groups, 3, tmp_path, [[0, 2], [1]]) == [
        ([0.0, 2.0], [0, 2], 0, 4),
        ([1.0], [1], 0, 0),
        ([0.0, 2.0], [0, 2], 1, 4),
    ]


def test_ranks_are_in_the_order_of_the_results_however_the_group_was_written(
    tmp_path: Path,
) -> None:
    """torch sorts the ranks of a new group; a channel that does not know it mixes up its peers."""
    for rank, outcome in enumerate(run_ranks(gather_in_groups, 3, tmp_path, [[2, 0, 1]])):
        gathered, ranks, place, _ = outcome
        assert gathered == ranks
        assert ranks[place] == rank


def test_misuse_of_a_channel_is_an_error_of_ours() -> None:
    with pytest.raises(AssertionError, match="rank 5 is in none of the groups"):
        opened([[0], [1]], 5, Ledger())
    with pytest.raises(AssertionError, match="need a process group"):
        Channel([0, 1], 0, Ledger())
    with pytest.raises(AssertionError, match=r"all_to_all needs 1 rows, got \(2, 3\)"):
        Channel([0], 0, Ledger()).all_to_all(torch.ones(2, 3), "t")


def close(rank: int, size: int) -> tuple[bool, str]:
    channel = world_channel(rank, size)
    assert channel.group is not None
    channel.all_reduce(torch.ones(1), "t").wait()
    gc.disable()  # where it runs is no place for the end of a process group
    there = weakref.ref(channel.group)
    channel.close()
    try:
        channel.all_reduce(torch.ones(1), "t")
    except RuntimeError as error:
        return there() is not None, str(error)
    return there() is not None, "no error"


def test_a_closed_channel_leaves_no_process_group_to_the_collector(tmp_path: Path) -> None:
    """In a forked child of a data loader its end would wait for threads that are not there."""
    for is_there, error in run_ranks(close, 2, tmp_path):
        assert not is_there
        assert "This channel is closed" in error


def close_in_mid_flight(rank: int, size: int) -> None:
    channel = world_channel(rank, size, full_duplex=True)
    for _ in range(2):
        channel.all_gather(torch.ones(1 << 20), "t")  # nobody but gloo's thread holds the tensors
    channel.close()


@pytest.mark.timeout(60)  # both ranks would hang
def test_a_close_does_not_hold_the_gil_that_gloos_thread_waits_for(tmp_path: Path) -> None:
    """With torch 2.6, both ranks hung forever (`make test-oldest` runs this)."""
    run_ranks(close_in_mid_flight, 2, tmp_path)


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_close_waits_for_gloos_threads_unless_a_rank_is_lost(is_lost: bool) -> None:
    """Gloo may miss that a connection broke, and would then wait for the whole timeout."""
    over, freed = threading.Event(), threading.Event()

    class Backend:
        def __del__(self) -> None:  # joins gloo's threads
            over.wait(30.0)
            freed.set()

    group: Any = SimpleNamespace(_get_backend=lambda device: Backend())
    channel = Channel([0, 1], 0, Ledger(), group)
    channel.peers = SimpleNamespace(ended=is_lost, close=lambda owner: None)  # type: ignore[assignment]
    if not is_lost:
        over.set()
    channel.close()
    assert freed.is_set() is not is_lost
    over.set()
    assert freed.wait(30.0)


def test_a_stream_that_waits_for_nccl_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is not blocked; how long the device was is known when it has passed the events."""
    clock, passed = [0.0], [False]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any) -> None:
            self.at_ms = clock[0]

        def query(self) -> bool:
            return passed[0]

        def elapsed_time(self, end: Event) -> float:
            return end.at_ms - self.at_ms

    class Work:
        def wait(self) -> None:
            clock[0] += 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    ledger, group = Ledger(), object()
    device = torch.device("cuda", 0)
    channel = Channel([0, 1], 0, ledger, group, device)  # type: ignore[arg-type]
    result = torch.ones(2)
    assert channel._pending([Work(), Work()], result, "a").wait() is result
    ledger.settle()
    assert ledger.seconds_waited == 0.0
    passed[0] = True
    with ledger.during(STEPS):
        channel._pending([Work()], result, "b").wait()
    assert dict(ledger.seconds_by_tag) == {"a": 0.5, "b": 0.25}
    assert dict(ledger.seconds_by_phase) == {START: 0.5, STEPS: 0.25}


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("default", ["gloo", "nccl"])
def test_only_nccl_groups_are_split_from_the_default_group(
    default: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning binds its group to the device; torch would give gloo's as the parent to nccl."""
    device, bound = torch.device("cuda", 0), []
    world = SimpleNamespace(bound_device_id=device)

    def new_group(*_: Any, **__: Any) -> object:
        bound.append(world.bound_device_id)
        return object()

    monkeypatch.setattr(dist.distributed_c10d._world, "default_pg", world)
    monkeypatch.setattr(dist, "get_backend", lambda: default)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(Channel, "_start_monitor", lambda *_: None)
    Channel.open([[0, 1]], 0, Ledger(), backend, device=device)
    assert bound == [device if default == backend == "nccl" else None]
    assert world.bound_device_id == device


def test_nccl_gathers_by_its_own_all_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange would copy the tensor once for every rank before sending it."""
    done = SimpleNamespace(wait=lambda: None)

    def gather(received: Tensor, sent: Tensor, **_: Any) -> Any:
        assert sent.is_contiguous()
        received.copy_(sent)
        return done

    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    monkeypatch.setattr(Channel, "_order_stream", lambda *_: None)
    ledger, group = Ledger(), object()
    channel = Channel([0, 1, 2], 0, ledger, group, torch.device("cuda", 0))  # type: ignore[arg-type]
    for tensor in (torch.ones(2, 3).t(), torch.tensor(4)):
        rows = channel.all_gather(tensor, "a").wait()
        assert torch.equal(rows, tensor.expand(3, *tensor.shape))
    assert ledger.bytes_by_tag["a"] == (2 * 6 * 4 + 2 * 8)


@pytest.mark.parametrize("axes", [(REPLICA, DATA), (DATA, TENSOR), (REPLICA, TENSOR)], ids=str)
def test_only_the_tensor_groups_kernels_have_priority(
    axes: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[tuple[int, ...], Any] = {}

    def new_group(ranks: list[int], timeout: Any, backend: str, options: Any) -> object:
        if backend == "nccl":
            made[tuple(ranks)] = options
        return object()

    nccl, world = SimpleNamespace(Options=SimpleNamespace), SimpleNamespace(bound_device_id=None)
    monkeypatch.setattr(dist.distributed_c10d._world, "default_pg", world)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(Channel, "_start_monitor", lambda *_: None)
    timeout = timedelta(minutes=7)
    info = RankInfo(0, 4, timeout, "nccl", torch.device("cuda", 0), None)
    ReplicaChannels.open(Mesh(axes, (2, 2)), info, (Ledger(), Ledger()))
    expected = SimpleNamespace(is_high_priority_stream=True, _timeout=timeout)
    inner = expected if axes[1] == TENSOR else None
    assert (made[0, 1], made.get((0, 2))) == (inner, None)
