"""Four collectives on real gloo ranks against arithmetic; what is counted against what crosses the
interface; and a peer that is gone."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.comm.ledger import (
    Ledger,
    LedgerTotals,
    all_gather_bytes,
    all_to_all_bytes,
    broadcast_bytes,
    ring_all_reduce_bytes,
)
from lightning_commfree.comm.mesh import DATA, REPLICA, Mesh
from tests.world import free_port, run_ranks

SIZES = [2, 3]
Collective = Callable[[Channel, Tensor], Pending[Tensor]]
COLLECTIVES: dict[str, Collective] = {
    "all_reduce": lambda channel, tensor: channel.all_reduce(tensor, "t"),
    "all_gather": lambda channel, tensor: channel.all_gather(tensor, "t"),
    "all_to_all": lambda channel, tensor: channel.all_to_all(tensor, "t"),
    "broadcast": lambda channel, tensor: channel.broadcast(tensor, "t"),
}
FORMULAS = {
    "all_reduce": ring_all_reduce_bytes,
    "all_gather": all_gather_bytes,
    "all_to_all": all_to_all_bytes,
    "broadcast": broadcast_bytes,
}


def world_channel(rank: int, size: int) -> Channel:
    return Channel.open([list(range(size))], rank, Ledger())


def of_rank(rank: int, *shape: int) -> Tensor:
    """Whole numbers that tell where they are from, so that sums are exact in any order."""
    numel = torch.Size(shape).numel()
    return (torch.arange(numel, dtype=torch.float32) + 1000.0 * (rank + 1)).view(shape)


# Against arithmetic


def exchange(rank: int, size: int) -> dict[str, Any]:
    channel = world_channel(rank, size)
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


@pytest.mark.parametrize("size", SIZES)
def test_every_collective_is_what_arithmetic_says(size: int, tmp_path: Path) -> None:
    for rank, results in enumerate(run_ranks(exchange, size, tmp_path)):
        expected = expected_exchange(rank, size)
        assert results.keys() == expected.keys()
        for name, tensor in expected.items():
            assert results[name].dtype == tensor.dtype, name
            assert torch.equal(results[name], tensor), f"{name} on rank {rank}"


# Pendings


def launch_all_then_wait(rank: int, size: int, order: list[int]) -> tuple[list[Tensor], Any]:
    """Launch six collectives, wait in `order`; return the results in the order of the launches."""
    channel = world_channel(rank, size)
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


@pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [2, 5, 0, 3, 1, 4]])
def test_pendings_may_be_waited_for_in_any_order(order: list[int], tmp_path: Path) -> None:
    size = 3
    for rank, (results, seconds) in enumerate(
        run_ranks(launch_all_then_wait, size, tmp_path, order)
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


def wait_twice(rank: int, size: int) -> dict[str, Any]:
    channel = world_channel(rank, size)
    pending = channel.all_gather(of_rank(rank, 3), "t")
    first = pending.wait()
    waited = channel.ledger.seconds_waited
    seen: list[Tensor] = []
    chained = channel.all_gather(of_rank(rank, 3), "t").then(lambda t: seen.append(t) or t.sum())
    calls_before_wait = len(seen)
    total = chained.wait()
    return {
        "same object": pending.wait() is first,
        "second wait counts nothing": waited > 0.0 and channel.ledger.collectives == 2,
        "then has not run yet": calls_before_wait,
        "then, twice the same": chained.wait() is total,
        "then runs": len(seen),
        "total": float(total),
    }


def test_wait_twice_is_the_same_object_and_then_runs_once(tmp_path: Path) -> None:
    for result in run_ranks(wait_twice, 2, tmp_path):
        assert result == {
            "same object": True,
            "second wait counts nothing": True,
            "then has not run yet": 0,
            "then, twice the same": True,
            "then runs": 1,
            "total": float(sum(of_rank(r, 3).sum() for r in range(2))),
        }


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
    pending = channel._pending(Work(), torch.ones(1), "t")
    pending.wait()
    first = ledger.seconds_waited
    assert first >= 0.01
    pending.wait()
    assert ledger.seconds_waited == first


# One rank alone, and parts of the world


@pytest.mark.parametrize("name", COLLECTIVES)
def test_one_rank_gets_its_own_tensor_back_and_sends_nothing(name: str) -> None:
    channel = Channel.open([[0]], 0, Ledger())  # needs no process group, so none is initialized
    tensor = of_rank(0, 1, 3)
    result = COLLECTIVES[name](channel, tensor).wait()
    assert torch.equal(result, of_rank(0, 1, 1, 3) if name == "all_gather" else of_rank(0, 1, 3))
    assert result.data_ptr() == tensor.data_ptr(), "nothing is copied"
    if name != "all_gather":  # which has a dimension more
        assert result is tensor
    assert channel.ledger.totals() == LedgerTotals(0, 0.0, 0)
    channel.close()


def talk_along_two_axes(rank: int, size: int) -> dict[str, Any]:
    mesh = Mesh((REPLICA, DATA), (2, 2))
    ledger = Ledger()
    replicas = Channel.open(mesh.groups(REPLICA), rank, ledger)
    data = Channel.open(mesh.groups(DATA), rank, ledger)
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
    data.close()
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
        }


def gather_in_groups(rank: int, size: int, groups: list[list[int]]) -> Any:
    channel = Channel.open(groups, rank, Ledger())
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
    with pytest.raises(AssertionError, match="rank 5 stands in none of the groups"):
        Channel.open([[0], [1]], 5, Ledger())
    with pytest.raises(AssertionError, match="needs a process group"):
        Channel([0, 1], 0, Ledger())
    with pytest.raises(AssertionError, match=r"all_to_all wants 1 rows, got \(2, 3\)"):
        Channel([0], 0, Ledger()).all_to_all(torch.ones(2, 3), "t")


# A peer that is gone

PATIENCE = timedelta(seconds=2)


def outlive_a_peer(rank: int, port: int, folder: Path, may_die: Any) -> None:
    """Rank 1 first sends nothing, then is gone; rank 0 writes down what it is told, and when."""
    store = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    silent, dead = (Channel.open([[0, 1]], rank, Ledger(), timeout=PATIENCE) for _ in range(2))
    for channel in (silent, dead):
        channel.all_reduce(torch.ones(1), "t").wait()
    if rank == 1:
        may_die.wait()
        os._exit(1)  # no farewell: nothing is closed but what the kernel closes
    told = []
    for channel in (silent, dead):
        pending = channel.all_gather(torch.ones(1), "t")
        for _ in range(2):
            start = time.monotonic()
            try:
                pending.wait()
                error = None
            except RuntimeError as caught:
                error = str(caught)
            told.append((error, time.monotonic() - start))
        told.append((channel.ledger.seconds_waited, 0.0))
        may_die.set()
        time.sleep(0.3)
    torch.save(told, folder / "told.pt")
    os._exit(0)  # taking a process group down that lost a peer is not what is tested here


def test_a_silent_or_dead_peer_makes_wait_raise_and_not_hang(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    may_die, port = context.Event(), free_port()
    ranks = [
        context.Process(target=outlive_a_peer, args=(rank, port, tmp_path, may_die))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=30)
    assert [rank.exitcode for rank in ranks] == [0, 1], "rank 0 is told, rank 1 is gone"
    told = torch.load(tmp_path / "told.pt")
    silent, silent_again, (waited, _), dead, dead_again, _ = told
    limit = PATIENCE.total_seconds()
    assert "imed out" in silent[0]
    assert limit * 0.9 < silent[1] < limit + 2.0
    assert waited >= limit * 0.9, "time that a failed transfer took is counted too"
    assert dead[0]
    assert dead[1] < limit * 0.9, "a closed connection is known at once, not at the timeout"
    for error, seconds in (silent_again, dead_again):
        assert error, "a failed transfer has no result the second time either"
        assert seconds < limit + 2.0


# The ledger against the network interface

CLONE_NEWNET = 0x4000_0000  # of linux/sched.h; `os.unshare` comes with Python 3.12
SENDERS = 3  # with two ranks b (n - 1) and b are the same, and some mistakes are not seen
NUMEL = SENDERS * 400_000  # fp32: 4.8 MB
TOLERANCE = 0.02  # headers of TCP and IP, 64 KB a packet here, and the barriers

# what a plausible wrong formula says of b bytes and n ranks
MISTAKES = {
    "all_reduce": lambda b, n: b * (n - 1) / n,  # reduce-scatter without the gather
    "all_gather": lambda b, n: b * (n - 1) / n,  # b taken for the gathered size
    "all_to_all": lambda b, n: b,  # counts what stays at home
    "broadcast": lambda b, n: b,  # every rank as if it were a receiver
}


def bytes_on_the_interface() -> int:
    """Bytes sent over `lo` in the network namespace of this process.

    /proc/self follows the process; /sys/class/net shows the namespace it was mounted in.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise RuntimeError("there is no interface `lo`")


def send_and_look(rank: int, size: int) -> dict[str, tuple[int, int]]:
    """For every collective: what the ledger counts, and what all ranks put on the interface."""
    channel = world_channel(rank, size)
    tensor = torch.ones(size, NUMEL // size)
    counted: dict[str, tuple[int, int]] = {}
    for name, collective in {"nothing": None, **COLLECTIVES}.items():
        dist.barrier()
        on_interface, in_ledger = bytes_on_the_interface(), channel.ledger.bytes_sent
        dist.barrier()
        if collective is not None:
            collective(channel, tensor).wait()
        dist.barrier()
        in_ledger = channel.ledger.bytes_sent - in_ledger
        counted[name] = (in_ledger, bytes_on_the_interface() - on_interface)
    return counted


def in_own_network(folder: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    assert bytes_on_the_interface() == 0, "a new network has sent nothing"
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.save(run_ranks(send_and_look, SENDERS, folder), folder / "counted.pt")


def may_make_networks() -> bool:
    if not shutil.which("unshare") or not shutil.which("ip") or os.geteuid() != 0:
        return False
    return subprocess.run(["unshare", "--net", "true"], check=False).returncode == 0


def test_the_ledger_counts_what_crosses_the_interface(tmp_path: Path) -> None:
    """The ranks run in a network of their own, where nobody else sends."""
    if not may_make_networks():
        pytest.skip("a network of its own needs Linux, root, `unshare` and `ip`")
    child = multiprocessing.get_context("fork").Process(target=in_own_network, args=(tmp_path,))
    child.start()
    child.join(timeout=60)
    assert child.exitcode == 0
    ranks = torch.load(tmp_path / "counted.pt")
    idle = ranks[0]["nothing"][1]
    assert ranks[0]["nothing"][0] == 0
    payload = 4 * NUMEL
    for name, formula in FORMULAS.items():
        in_ledger = [counted[name][0] for counted in ranks]
        assert in_ledger == [formula(payload, SENDERS)] * SENDERS, name
        crossed = ranks[0][name][1] - idle
        assert crossed == pytest.approx(sum(in_ledger), rel=TOLERANCE), name
        mistaken = SENDERS * MISTAKES[name](payload, SENDERS)
        assert crossed != pytest.approx(mistaken, rel=TOLERANCE), f"{name}: the test sees nothing"
