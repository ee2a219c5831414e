"""The compared training methods, and the messages of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commfree_planner.bytes_sent import (
    all_reduce_bytes,
    all_reduce_rounds,
    exchange_phases,
    exchange_rounds,
    payload_bytes,
    power_sgd_floats,
    vote_bytes,
)
from commfree_planner.layer_sums import LayerSums
from commfree_planner.model import build_exchange
from commfree_planner.simulation import Exchange, Message
from commfree_planner.store import STATE_BYTES, STATE_CYCLES, store_exchange
from commfree_planner.training import Training

DATA_PARALLEL = "data parallel"
BF16 = "DDP, bf16 hook"
POWER_SGD = "DDP, PowerSGD"
LION = "Lion, votes"
DILOCO = "DiLoCo"
BUCKET = "elastic bucket"
HUB = "elastic hub"
DOMINO = "Domino"
POWER_SGD_RANK = 4


class Method(NamedTuple):
    """A training method and its messages."""

    name: str
    setting: str
    exchange: Exchange | LayerSums


def methods(training: Training) -> list[Method]:
    """Return all methods: those that exchange in every step, DiLoCo's variants, elastic, Domino.

    The variants of DiLoCo are in the paper's order, and each sends less than the one before, or
    less at a time: one blocking fragment in fp32; P fragments; with overlap; with the training's
    `wire_dtype`. Elastic replicas have the last variant's setting, and are compared from two
    replicas on, because a single one sends its messages too. Domino requires the training's tokens
    per step.
    """
    count, tau, wire = training.fragment_count, training.overlap_steps, training.wire_dtype
    found = [
        Method(DATA_PARALLEL, f"every step, {training.gradient_dtype}", training.data_parallel())
    ]
    if training.gradient_dtype != "bf16":
        found.append(Method(BF16, "every step, bf16", training.data_parallel("bf16")))
    found += [
        Method(POWER_SGD, f"every step, rank {POWER_SGD_RANK}", power_sgd(training)),
        Method(LION, "every step, 1 bit", lion(training)),
        Method(DILOCO, "P=1, tau=0, fp32", training.diloco(1, 0, "fp32")),
        Method("streaming", f"P={count}, tau=0, fp32", training.diloco(count, 0, "fp32")),
        Method("+ overlap", f"P={count}, tau={tau}, fp32", training.diloco(count, tau, "fp32")),
        Method(f"+ {wire}", f"P={count}, tau={tau}, {wire}", training.diloco(count, tau, wire)),
    ]
    if training.num_replicas > 1:
        setting = found[-1].setting
        found += [
            Method(BUCKET, setting, elastic(training, hub=False)),
            Method(HUB, setting, elastic(training, hub=True)),
        ]
    if training.tokens_per_step is not None:
        found.append(Method(DOMINO, f"{training.num_replicas} ranks, 2 halves", domino(training)))
    return found


def power_sgd(training: Training) -> Exchange:
    """Return the messages of DDP's PowerSGD hook, which has two all-reduces per layer."""
    model, rounds = training.model, 2 * all_reduce_rounds(training.num_replicas)

    def message(layer: int) -> Message:
        floats = power_sgd_floats(
            model.layer_params(layer), model.activation_width, POWER_SGD_RANK, in_block=layer > 0
        )
        sent = all_reduce_bytes(round(4 * floats), training.num_replicas)
        return Message(layer, layer, sent, rounds)

    layers = range(len(model.block_params) + 1)
    return Exchange(1, 0, (tuple(map(message, layers)),))


def lion(training: Training) -> Exchange:
    """Return the messages of `DistributedLionStrategy` by majority; each replica is a worker."""
    return build_exchange(
        training.model,
        lambda numel: vote_bytes(numel, training.num_replicas),
        by_layer=True,
        rounds=exchange_rounds(training.num_replicas),
        connections=max(training.num_replicas - 1, 1),
        phases=exchange_phases(training.num_replicas),
    )


def elastic(training: Training, *, hub: bool) -> Exchange:
    """Return the messages of `ElasticDiLoCoStrategy`, and the state that one replica stores.

    The state is spread evenly over the exchanges of its cycles. The link is that of the replica
    that stores it.

    Args:
        training: the run.
        hub: whether the store is one machine, with a link like a replica's, which carries the bytes
            of all replicas. Otherwise it is as fast as all of them together, like a bucket.
    """
    model, members = training.model, training.num_replicas
    state = STATE_BYTES * model.params / (STATE_CYCLES * training.fragment_count)  # per exchange

    def message(layers: Sequence[int]) -> Message:
        numel = sum(map(model.layer_params, layers))
        exchange = store_exchange(numel, members, training.wire_dtype)
        requests = 3 + (2 * members - 1 if exchange.two_phase else 0)  # in a row
        return Message(
            0,
            0,
            exchange.sent + state / members,
            rounds=2 * requests,
            connections=members if hub else 1,
            phases=4 if exchange.two_phase else 2,
            moved_bytes=state + (exchange.total if hub else exchange.moved),
        )

    fragments = model.fragments(training.fragment_count)
    return Exchange(
        training.sync_every,
        training.overlap_steps,
        tuple((message(layers),) for layers in fragments),
        training.sync_seconds,
    )


def domino(training: Training) -> LayerSums:
    """Return the messages of `DominoTPStrategy` with all replicas as one tensor-parallel group.

    It trains on the batches of all replicas together, so a step computes as long as theirs.
    """
    assert training.tokens_per_step is not None, "there is no row without the tokens per step"
    numel = training.num_replicas * training.tokens_per_step * training.model.activation_width
    size = payload_bytes(round(numel), training.gradient_dtype)
    return LayerSums(
        len(training.model.block_params),
        all_reduce_bytes(size, training.num_replicas),
        all_reduce_rounds(training.num_replicas),
    )
