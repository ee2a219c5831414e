"""Wires with error feedback against the serial twin with residuals, bit for bit, on both routes.

Replicas are threads: the exchange's own code runs on each, only the transport is played.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from examples.topk_codec import TopKCodec
from lightning_commfree.diloco import (
    CODECS,
    Codec,
    DiLoCoSettings,
    StreamingDiLoCo,
    split_into_fragments,
)
from lightning_commfree.diloco.codec import BLOCK, Int2Codec, decode_all
from lightning_commfree.diloco.exchange import TAG
from lightning_commfree.diloco.transport import FixedTransport
from tests.diloco.serial import SerialDiLoCo
from tests.diloco.training import AVERAGING, DEFAULTS, NESTEROV, alone
from tests.lion.threads import ThreadChannel, in_threads

STEPS, SYNC_EVERY, OVERLAP_STEPS, MIX = 18, 4, 3, 0.5
SHAPES = {"x": (2000,), "y": (70, 100)}  # fragments; top-k has one chunk and two
WIRES: dict[str, Codec] = {"int2": CODECS["int2"], "topk": TopKCodec()}  # type: ignore[dict-item]
CASES = [("int2", 2), ("int2", 3), ("topk", 2), ("topk", 3)]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for seed, (name, shape) in enumerate(SHAPES.items()):
            start = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            setattr(self, name, nn.Parameter(start))


@torch.no_grad()
def inner_step(module: nn.Module, replica: int, step: int) -> None:
    """Towards zero, with noise of many magnitudes that is the replica's own."""
    generator = torch.Generator().manual_seed(1000 * replica + step)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator) ** 3
        parameter.sub_(0.1 * parameter + 0.01 * noise)


def changes(wire: Any, **more: Any) -> dict[str, Any]:
    schedule = {"sync_every": SYNC_EVERY, "overlap_steps": OVERLAP_STEPS, "num_fragments": 2}
    pattern = {"fragment_pattern": "balanced", "wire_dtype": WIRES.get(wire, wire)}
    return {**DEFAULTS, **schedule, **pattern, **more}


def start(module: nn.Module, channel: ThreadChannel, wire: Any, **more: Any) -> StreamingDiLoCo:
    settings = DiLoCoSettings(**changes(wire, **more))
    fragments = split_into_fragments(module, 2, "balanced")
    return StreamingDiLoCo(module, fragments, settings, FixedTransport(channel))


def state(module: nn.Module, diloco: StreamingDiLoCo) -> dict[str, Tensor]:
    """What one replica holds, by name: its weights, its global copies and its residuals."""
    found = {name: p.detach().clone() for name, p in module.named_parameters()}
    for fragment in diloco.fragments:
        [name] = fragment.fragment.parameters
        found[f"outer {name}"] = fragment.global_copy.clone()
        assert fragment.residual is not None
        found[f"residual {name}"] = fragment.residual.clone()
    return found


def run(
    module: nn.Module, diloco: StreamingDiLoCo, rank: int, steps: range
) -> list[dict[str, Tensor]]:
    states = []
    for step in steps:
        inner_step(module, rank, step)
        diloco.after_step()
        diloco.wait_in_flight()  # a residual is complete when the second rounding has come back
        states.append(state(module, diloco))
    return states


class WithResiduals(SerialDiLoCo):
    """The serial twin with a residual per replica and tensor, and a second rounding of means.

    Args:
        size: number of replicas.
        wire: codec until `finish`, which uses fp4.
        weight: of a residual in the next outer gradient.
        two_phase: names of the fragments whose means are rounded again, until `finish` and in it.
    """

    def __init__(
        self, size: int, wire: Codec, weight: float, two_phase: tuple[set[str], set[str]]
    ) -> None:
        modules = [Pair() for _ in range(size)]
        names = [list(f.parameters) for f in split_into_fragments(Pair(), 2, "balanced")]
        step = lambda m, step: inner_step(modules[m], m, step)  # noqa: E731
        super().__init__(modules, step, names, SYNC_EVERY, OVERLAP_STEPS, MIX, NESTEROV)
        self.wire, self.weight = wire, weight
        self.two_phase, self.in_finish = two_phase
        self.residuals = [{n: torch.zeros(s) for n, s in SHAPES.items()} for _ in range(size)]

    def shards(self, name: str) -> tuple[int, int]:
        """Return the number of shards and of the values in each, which are whole blocks."""
        numel, size = self.outer[name].numel(), len(self.modules)
        if name not in self.two_phase:
            return 1, numel
        return size, -(-numel // (size * BLOCK)) * BLOCK

    def through(self, name: str, values: Tensor) -> Tensor:
        count, size = self.shards(name)
        decoded = []
        for piece in pad(values.flatten(), (0, count * size - values.numel())).view(count, size):
            payload = torch.empty(self.wire.num_bytes(size), dtype=torch.uint8)
            self.wire.encode(piece, payload)
            decoded.append(decode_all(self.wire, payload, torch.empty(size)))
        return torch.cat(decoded)[: values.numel()].view(values.shape)

    @torch.no_grad()
    def deltas(self, p: int) -> list[dict[str, Tensor]]:
        [name] = self.fragments[p]
        sent = []
        for module, residuals in zip(self.modules, self.residuals, strict=True):
            values = self.outer[name] - module.get_parameter(name)
            values = values + residuals[name] * self.weight
            sent.append(self.through(name, values))
            residuals[name] = values - sent[-1]
        mean = self.mean(sent)
        if name in self.two_phase:
            rounded = self.through(name, mean)
            # the owner of each shard makes up for its error, for all replicas
            lost, (_, size) = (mean - rounded).flatten() * len(sent), self.shards(name)
            for m, residuals in enumerate(self.residuals):
                part = slice(m * size, (m + 1) * size)
                residuals[name].view(-1)[part] += lost[part]
            mean = rounded
        return [{name: mean}] * len(sent)

    def finish(self) -> None:
        for _, p, deltas, _ in self.on_the_way:
            self.land(p, deltas, self.mix)
        self.on_the_way = []
        # a round of its own: what it loses, and what is left of the rounds before, is dropped
        self.wire, self.two_phase, self.weight = CODECS["fp4"], self.in_finish, 0.0
        for p in range(len(self.fragments)):
            self.take_the_mean(p, self.deltas(p))
        self.residuals = [{n: torch.zeros(s) for n, s in SHAPES.items()} for _ in self.modules]

    def healthy(self, deltas: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        return deltas[:1]  # each is the mean already

    def states(self) -> list[dict[str, Tensor]]:
        return [
            {
                **{name: p.detach().clone() for name, p in module.named_parameters()},
                **{f"outer {n}": self.outer[n].detach().flatten().clone() for n in SHAPES},
                **{f"residual {n}": residuals[n].flatten().clone() for n in SHAPES},
            }
            for module, residuals in zip(self.modules, self.residuals, strict=True)
        ]


def routes(diloco: StreamingDiLoCo) -> tuple[set[str], set[str]]:
    """Names of the fragments that take two phases, until `finish` and in it."""
    names = [fragment.fragment.parameters[0] for fragment in diloco.fragments]
    transport: Any = diloco.transport
    every = transport.exchanges, transport.last_exchanges
    first, last = (
        {name for name, exchange in zip(names, exchanges, strict=True) if exchange.route.two_phase}
        for exchanges in every
    )
    return first, last


def play(channel: ThreadChannel, wire: Any) -> Any:
    """Train and finish; return the state after every step and at the end, and more."""
    module = Pair()
    diloco = start(module, channel, wire)
    found = run(module, diloco, channel.rank, range(1, STEPS + 1))
    in_flight = diloco.in_flight
    diloco.finish()
    diloco.close()
    return [*found, state(module, diloco)], routes(diloco), in_flight


def twin(size: int, wire: Codec, weight: float, two_phase: Any) -> list[list[dict[str, Tensor]]]:
    """Return the states of every replica, step by step."""
    serial = WithResiduals(size, wire, weight, two_phase)
    by_step = []
    for _ in range(STEPS):
        serial.run_step()
        by_step.append(serial.states())
    serial.finish()
    by_step.append(serial.states())
    return [list(states) for states in zip(*by_step, strict=True)]


def same(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> list[str]:
    """Return where they differ."""
    return [
        f"step {step} {name}"
        for step, (a, b) in enumerate(zip(found, expected, strict=True), 1)
        for name in b
        if not torch.equal(a[name].flatten(), b[name].flatten())
    ]


@pytest.mark.parametrize(("name", "size"), CASES)
def test_equals_the_twin_after_every_step(name: str, size: int) -> None:
    """With two fragments in flight, on both routes, and with the mean in fp4 at the end."""
    wire = WIRES[name]
    played = in_threads(size, lambda channel: play(channel, name))
    _, two_phase, in_flight = played[0]
    assert two_phase[0] == (set(SHAPES) if (name, size) == ("int2", 3) else set())
    assert two_phase[1] == (set(SHAPES) if size == 3 else set())
    assert len(in_flight) == 2, "`finish` has something to land"
    expected = twin(size, wire, float(wire.error_feedback), two_phase)
    for (found, _, _), wanted in zip(played, expected, strict=True):
        assert same(found, wanted) == []
        residual = found[STEPS // 2]["residual x"]
        assert residual.norm() > 0
        assert not found[-1]["residual x"].any(), "it belongs to weights that are replaced"

    # the likely mistakes would be seen: a residual that is not added, or not as it should be
    for wrong in (0.0, 0.9):
        [first, *_] = twin(size, wire, wrong, two_phase)
        assert same(played[0][0], first)


def test_a_topk_residual_that_is_not_decayed_would_be_seen() -> None:
    found, two_phase, _ = in_threads(2, lambda channel: play(channel, "topk"))[0]
    assert same(found, twin(2, WIRES["topk"], 1.0, two_phase)[0])


def test_the_loss_of_the_second_rounding_would_be_missed() -> None:
    played = in_threads(3, lambda channel: play(channel, "int2"))
    first = played[0][0]
    shard = -(-2000 // (3 * BLOCK)) * BLOCK
    # after the first exchange of `x`, the first replica has a larger error in its own shard
    lost = next(s["residual x"] for s in first if s["residual x"].any())
    assert lost[:shard].norm() > 1.1 * lost[shard:].norm() * (shard / (2000 - shard)) ** 0.5


@pytest.mark.parametrize(("name", "size"), [("int2", 3), ("topk", 2)])
def test_a_run_resumed_in_flight_equals_the_uninterrupted_one(name: str, size: int) -> None:
    """Fragments leave after steps 4, 6, 8, 10 and so on, and land three steps later."""
    stops = (9, 10, 11)  # one, two and one in flight

    def replica(channel: ThreadChannel) -> tuple[list[str], list[int]]:
        module = Pair()
        diloco = start(module, channel, name)
        saved, counts, straight = {}, [], []
        for step in range(1, STEPS + 1):
            straight += run(module, diloco, channel.rank, range(step, step + 1))
            if step in stops:
                saved[step] = copy.deepcopy(diloco.state_dict())
                counts.append(len(diloco.in_flight))
        diloco.close()
        wrong = []
        for step, states in saved.items():
            resumed = Pair()
            other = start(resumed, channel, name)
            other.load_state_dict(*states)
            found = run(resumed, other, channel.rank, range(step + 1, STEPS + 1))
            wrong += same(found, straight[step:])
            other.close()
        return wrong, counts

    for wrong, counts in in_threads(size, replica):
        assert wrong == []
        assert counts == [1, 2, 1]


def test_a_newcomer_starts_without_a_residual() -> None:
    def replica(channel: ThreadChannel) -> bool:
        module = Pair()
        diloco = start(module, channel, "int2")
        run(module, diloco, channel.rank, range(1, 10))
        shared, _ = copy.deepcopy(diloco.state_dict())
        newcomer = start(Pair(), channel, "int2")
        newcomer.load_state_dict(shared, None)
        diloco.close()
        newcomer.close()
        old, new = diloco.fragments[0].residual, newcomer.fragments[0].residual
        assert old is not None
        assert new is not None
        return bool(old.any()) and not new.any()

    assert in_threads(2, replica) == [True, True]


@pytest.mark.parametrize(("name", "size"), CASES)
def test_the_bytes_are_those_of_the_formulas(name: str, size: int) -> None:
    """Those that leave a worker; `test_fragment_exchange` has the ledger of real ranks."""
    wire = WIRES[name]

    def replica(channel: ThreadChannel) -> tuple[int, int]:
        module = Pair()
        diloco = start(module, channel, name)
        run(module, diloco, channel.rank, range(1, 11))  # two exchanges of each fragment
        diloco.wait_in_flight()
        diloco.close()
        return diloco.bytes_per_cycle, channel.sent[TAG]

    header, norms = 72, 4 * (size + 1)
    expected = 0
    for numel in (2000, 7000):
        shard = -(-numel // (size * BLOCK)) * BLOCK
        whole, part = (rounded(wire.num_bytes(n)) for n in (numel, shard))
        two = (header + part) + (rounded(norms) + part)
        expected += (size - 1) * (two if (name, size) == ("int2", 3) else header + whole)
    for per_cycle, sent in in_threads(size, replica):
        assert per_cycle == expected
        assert sent == 2 * expected


class Slopes(nn.Module):
    """A quadratic loss whose curvature spans three orders of magnitude."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.curvature = torch.logspace(-3, 0, 4 * BLOCK)
        self.optimum = torch.randn(4 * BLOCK, generator=generator) / self.curvature.sqrt()
        self.x = nn.Parameter(torch.zeros(4 * BLOCK))

    @torch.no_grad()
    def inner_steps(self) -> None:
        """Thirty steps of gradient descent at once."""
        self.x += (self.optimum - self.x) * (1 - (1 - 0.02 * self.curvature) ** 30)


def loss_after(cycles: int, wire: Any, **more: Any) -> float:
    """Of a single replica, whose exchanges are rounded as all are."""
    module = Slopes()
    settings = {**DEFAULTS, "sync_every": 1, "overlap_steps": 0, "wire_dtype": wire, **more}
    diloco = StreamingDiLoCo(
        module,
        split_into_fragments(module, 1, "strided"),
        DiLoCoSettings(**settings),
        FixedTransport(alone()),
    )
    for _ in range(cycles):
        module.inner_steps()
        diloco.after_step()
    diloco.close()
    return float((module.curvature * (module.x.detach() - module.optimum) ** 2).sum())


@pytest.mark.parametrize("mix", [0.0, 0.5])
@pytest.mark.parametrize("outer_lr", [0.4, 0.8])
def test_the_default_weight_is_stable_with_outer_momentum_and_1_is_not(
    outer_lr: float, mix: float
) -> None:
    outer = partial(torch.optim.SGD, lr=outer_lr, momentum=0.9, nesterov=True)
    loss = partial(loss_after, 200, mix=mix, outer_optimizer=outer)
    exact = loss("fp32")
    assert loss("int2") < 2 * exact
    assert not loss(Int2Codec(error_feedback=1.0)) < 100 * exact


def test_without_outer_momentum_1_is_the_best_weight() -> None:
    loss = partial(loss_after, 100, mix=0.0, outer_optimizer=AVERAGING)
    exact = loss("fp32")
    losses = [loss(Int2Codec(error_feedback=weight)) for weight in (0.0, 0.5, 1.0)]
    assert exact < losses[2] < losses[1] < losses[0]


def rounded(size: int) -> int:
    return -(-size // 8) * 8


def test_settings_of_a_codec_change_the_fingerprint() -> None:
    wires = Int2Codec(), Int2Codec(error_feedback=0.9)
    prints = {DiLoCoSettings(**changes(wire)).fingerprint()["wire_dtype"] for wire in wires}
    assert len(prints) == len(wires)
