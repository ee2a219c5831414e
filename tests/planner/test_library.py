"""The planner's formulas equal the library: payloads, exchanges, fragments, schedule."""

from __future__ import annotations

import ast
import math
import sys
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

import commfree_planner as planner
from commfree_planner import (
    Exchange,
    Model,
    all_reduce_bytes,
    exchange_bytes,
    payload_bytes,
)
from commfree_planner.store import STATE_CYCLES, store_exchange
from lightning_commfree.comm.exchange import View
from lightning_commfree.comm.ledger import Ledger, ring_all_reduce_bytes
from lightning_commfree.diloco import CODECS, Schedule, split_into_fragments
from lightning_commfree.diloco.exchange import cheaper_exchange
from lightning_commfree.elastic.algorithm import ElasticDiLoCo
from lightning_commfree.elastic.parts import StoreExchange
from lightning_commfree.elastic.transport import StoreTransport


@pytest.mark.parametrize("wire", CODECS)
def test_payloads_equal_the_wire_formats(wire) -> None:
    for numel in (1, 2, 255, 256, 257, 4096, 4097, 1_000_001):
        assert payload_bytes(numel, wire) == CODECS[wire].num_bytes(numel)


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 8])
def test_exchanges_send_the_predicted_bytes(num_replicas) -> None:
    reduced = all_reduce_bytes(1_000_000, num_replicas)
    assert math.floor(reduced) == ring_all_reduce_bytes(1_000_000, num_replicas)
    view = View.of(SimpleNamespace(size=num_replicas, ledger=None))
    for wire, wire_format in CODECS.items():
        real = cheaper_exchange(view, wire_format, 4_000_000).num_bytes
        predicted = exchange_bytes(payload_bytes(4_000_000, wire), num_replicas)
        # headers and padding; the other method would send at least half as much more
        assert predicted <= real <= 1.005 * predicted


@pytest.mark.parametrize("members", [1, 2, 3, 4, 8, 32, 33, 100])
@pytest.mark.parametrize("wire", CODECS)
def test_exchanges_through_a_store_move_the_predicted_bytes(wire, members) -> None:
    ways = set()
    for numel in (1, 257, 8191, 8192, 65_792, 131_584, 1_000_001):
        view = View(0, tuple(range(members)), SimpleNamespace(rank=0))
        transport = StoreTransport(SimpleNamespace(min_replicas=members), Ledger())
        transport.open((CODECS[wire], CODECS[wire]), [(numel, 0)])
        forecast = transport.exchange(0).num_bytes  # before any exchange, as `traffic()` does
        assert forecast == by_rank(transport, view, 0).num_bytes
        found = [by_rank(transport, view, rank) for rank in range(members)]
        sent = [one.num_bytes for one in found]
        message, two_phase = found[0].message_bytes, found[0].route.two_phase
        read = [(members - 1) * message] * members
        if two_phase:
            owned = [found[0].span(m)[1] if m < found[0].owners else 0 for m in range(members)]
            means = [num_bytes - message for num_bytes in sent]
            read = [
                (members - 1) * parts + sum(means) - mean
                for parts, mean in zip(owned, means, strict=True)
            ]
        predicted = store_exchange(numel, members, wire)
        assert predicted.two_phase == two_phase
        assert predicted.sent == pytest.approx(sum(sent) / members, rel=1e-12)
        assert predicted.moved == found[0].moved_bytes
        assert predicted.total == sum(sent) + sum(read)
        ways.add(two_phase)
    default = signature(ElasticDiLoCo).parameters["state_cycles"].default
    assert default == STATE_CYCLES
    assert len(ways) == (2 if members > 2 and wire != "int2" else 1)


def by_rank(transport: StoreTransport, view: View, rank: int) -> StoreExchange:
    """Return the exchange of fragment 0 as the member with this rank sees it."""
    transport.view = view._replace(channel=SimpleNamespace(rank=rank))
    return transport.exchange(0)


class Blocks(nn.Module):
    def __init__(self, count: int, with_rest: bool) -> None:
        super().__init__()
        if with_rest:
            self.embedding = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 3 + i) for i in range(count))


@pytest.mark.parametrize("with_rest", [True, False])
@pytest.mark.parametrize("count", [2, 5, 9])
def test_fragments_equal_the_librarys(count, with_rest) -> None:
    module = Blocks(count, with_rest)
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    blocks = tuple(sum(p.numel() for p in block.parameters()) for block in module.blocks)
    model = Model(blocks, sum(sizes.values()) - sum(blocks))
    for num_fragments in (None, *range(1, count + with_rest + 1)):
        theirs = split_into_fragments(module, num_fragments, "strided")
        ours = model.fragments(
            model.default_num_fragments if num_fragments is None else num_fragments
        )
        assert [sum(map(model.layer_params, layers)) for layers in ours] == [
            sum(sizes[name] for name in fragment.parameters) for fragment in theirs
        ]


def test_fragments_leave_in_the_steps_of_the_schedule() -> None:
    for sync_every, count in ((100, 9), (7, 3), (3, 5)):
        exchange = Exchange(sync_every, 0, ((),) * count)
        schedule = Schedule(sync_every, count, 0)
        assert [exchange.offset(p) for p in range(count)] == [
            schedule.offset(p) for p in range(count)
        ]


def test_the_planner_imports_only_the_standard_library() -> None:
    imported = set()
    for file in Path(planner.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module)
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
    own = {name for name in imported if name.startswith("commfree_planner.")}
    assert own
    assert {name.partition(".")[0] for name in imported - own} <= sys.stdlib_module_names
