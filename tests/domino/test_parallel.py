"""Evaluation, generation and unusual backwards of a sharded model; and joining it again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_commfree.domino import ParallelModel, gather_full_tensor
from tests.domino.models import (
    WORDS,
    Case,
    Outcome,
    all_of_it_in,
    batch_for,
    exact_loss,
    make,
    make_for,
    worst_error,
)
from tests.domino.ranks import divide, whole_gradients, with_channel
from tests.world import run_ranks

EXACT = {"rtol": 1e-12, "atol": 1e-12}  # float64: sums in another order
KINDS = ["gpt2", "llama one key head", "gemma3", "qwen3 moe"]


class Evaluation(NamedTuple):
    """Results of a model without training."""

    loss: Tensor
    logits: Tensor
    chosen: Tensor  # by `generate`
    played: int  # events of the schedule


class Joined(NamedTuple):
    """A model while it was sharded, and after it was joined again."""

    during: list[str]
    after: dict[str, Any]
    logits: Tensor
    blocks: str
    same_loss_function: bool
    tied: bool


def case_of(kind: str) -> Case:
    return Case(kind, 3, padding="left")


def evaluate(model: Any, case: Case, parallel: ParallelModel | None) -> Evaluation:
    events: list[Any] = []
    if parallel is not None:
        parallel.trace = lambda *event: events.append(event)
    batch = batch_for(case)
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    model.eval()
    with torch.no_grad(), all_of_it_in(model, torch.float64):
        loss, logits = model(**batch).loss, model(**inputs).logits
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 1}
        # no word twice, or a small model repeats one forever
        chosen = model.generate(**inputs, **settings, max_new_tokens=6, no_repeat_ngram_size=1)
    return Evaluation(loss, logits, chosen, len(events))


def hidden_states(model: Any, case: Case) -> tuple[Tensor, list[Tensor]]:
    """A loss of the states of all blocks, backward through it, and the states."""
    batch = batch_for(case)
    with all_of_it_in(model, torch.float64):
        states = model(**batch, output_hidden_states=True).hidden_states
        loss = torch.stack([state.square().mean() * (i + 1) for i, state in enumerate(states)])
        loss.sum().backward()
    return loss.sum().detach(), [state.detach() for state in states]


def two_backwards(model: Any, case: Case) -> Tensor:
    """Gradients of two batches, added up."""
    total = torch.zeros(())
    for seed in (1, 2):
        with all_of_it_in(model, torch.float64):
            loss = model(**batch_for(replace(case, seed=seed))).loss
            loss.backward()
        total = total + loss.detach()
    return total


def two_forwards(model: Any, case: Case) -> Tensor:
    """Two batches, of different sizes, before one backward."""
    batches = [batch_for(replace(case, seed=1)), batch_for(replace(case, seed=2, rows=2))]
    with all_of_it_in(model, torch.float64):
        loss = sum(model(**batch).loss * (i + 1) for i, batch in enumerate(batches))
        loss.backward()
    return loss.detach()


def in_evaluation_mode(model: Any, case: Case) -> Tensor:
    """A gradient of a model that is not training: of its input, say, to explain it."""
    model.eval()
    with all_of_it_in(model, torch.float64):
        loss = model(**batch_for(case)).loss
        loss.backward()
    return loss.detach()


def on_a_sharded_model(
    channel: Any, kind: str, function: Any, **more: Any
) -> tuple[Outcome, Any, int]:
    case = replace(case_of(kind), **more)
    model = make_for(case)
    parallel = divide(model, channel, case)
    if not parallel.sharding.sublayers:
        model.loss_function = exact_loss
    events: list[Any] = []
    parallel.trace = lambda *event: events.append(event)
    found = function(model, case)
    loss, extra = found if isinstance(found, tuple) else (found, None)
    return Outcome(loss, whole_gradients(parallel)), extra, len(events)


def on_a_plain_model(kind: str, function: Any, **more: Any) -> tuple[Outcome, Any]:
    case = replace(case_of(kind), **more)
    model = make_for(case)
    model.loss_function = exact_loss
    found = function(model, case)
    loss, extra = found if isinstance(found, tuple) else (found, None)
    return Outcome(loss, {name: p.grad for name, p in model.named_parameters()}), extra


def evaluate_sharded(channel: Any, kind: str) -> Evaluation:
    model = make(kind)
    parallel = divide(model, channel, case_of(kind))
    if not parallel.sharding.sublayers:
        model.loss_function = exact_loss
    return evaluate(model, case_of(kind), parallel)


def shard_and_join(channel: Any, kind: str, again: bool) -> Joined:
    model, case = make(kind), case_of(kind)
    for _ in range(2 if again else 1):  # a second fit shards it again
        base = getattr(model, model.base_model_prefix)
        loss_function = model.loss_function
        parallel = divide(model, channel, case)
        batch = batch_for(case)
        model(**batch).loss.backward()
        during = [type(module).__name__ for module in model.modules()]
        specs = parallel.sharding.specs
        parallel.unshard(
            {p: gather_full_tensor(p.detach(), spec, channel, "t") for p, spec in specs.items()}
        )
    del batch["labels"]
    with torch.no_grad():
        logits = model(**batch).logits
    after = {name: value.clone() for name, value in model.state_dict().items()}
    blocks = base.h if hasattr(base, "h") else base.layers
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    same = model.loss_function is loss_function
    return Joined(during, after, logits, type(blocks).__qualname__, same, tied)


FUNCTIONS = {
    f.__name__: f for f in (hidden_states, two_backwards, two_forwards, in_evaluation_mode)
}
CHECKPOINTED = {"checkpoint": True}
CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("hidden_states", "llama one key head", {}),
    ("two_backwards", "gpt2", {}),
    ("two_forwards", "llama one key head", {}),
    ("in_evaluation_mode", "gpt2", {}),
]
CALLS += [("two_forwards", "gpt2", CHECKPOINTED), ("two_backwards", "llama", CHECKPOINTED)]
CALLS += [("hidden_states", "olmo", {}), ("two_forwards", "olmo", {})]


def play_all(channel: Any) -> dict[str, Any]:
    return {
        "evaluations": {kind: evaluate_sharded(channel, kind) for kind in KINDS},
        "calls": [
            on_a_sharded_model(channel, kind, FUNCTIONS[name], **more) for name, kind, more in CALLS
        ],
        "given": {kind: shard_and_join(channel, kind, again=kind == "gpt2") for kind in KINDS},
    }


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results by rank."""
    return run_ranks(with_channel, 2, tmp_path_factory.mktemp("ranks"), play_all)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_and_generation(played: list[dict[str, Any]], kind: str) -> None:
    """Greedy, with a cache, of a padded batch; nothing is scheduled in it."""
    model = make(kind)
    model.loss_function = exact_loss
    expected = evaluate(model, case_of(kind), None)
    seen = batch_for(case_of(kind))["attention_mask"].bool()
    assert all(len(row[-6:].unique()) == 6 for row in expected.chosen)
    for rank in played:
        found = rank["evaluations"][kind]
        torch.testing.assert_close(found.loss, expected.loss, **EXACT)
        torch.testing.assert_close(found.logits[seen], expected.logits[seen], **EXACT)
        assert found.logits.shape[-1] == WORDS
        assert torch.equal(found.chosen, expected.chosen)
        assert found.played == 0


@pytest.mark.parametrize("call", range(len(CALLS)), ids=lambda i: " ".join(map(str, CALLS[i])))
def test_equals_one_process(played: list[dict[str, Any]], call: int) -> None:
    name, kind, more = CALLS[call]
    expected, extra = on_a_plain_model(kind, FUNCTIONS[name], **more)
    for rank in played:
        outcome, found, events = rank["calls"][call]
        assert worst_error(outcome, expected) < 1e-12
        scheduled = name != "hidden_states" and kind != "olmo"  # else blocks one by one
        assert (events > 0) == scheduled
        if extra is not None:
            seen = batch_for(replace(case_of(kind), **more))["attention_mask"].bool()
            assert len(found) == len(extra)
            for ours, theirs in zip(found, extra, strict=True):
                torch.testing.assert_close(ours[seen], theirs[seen], **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_join_restores_the_model(played: list[dict[str, Any]], kind: str) -> None:
    """Bit for bit, as if it had never been sharded; GPT-2 twice."""
    plain = make(kind)
    classes = [type(module).__name__ for module in plain.modules()]
    state = plain.state_dict()
    batch = batch_for(case_of(kind))
    del batch["labels"]
    with torch.no_grad():
        logits = plain(**batch).logits
    tied = plain.get_input_embeddings().weight is plain.get_output_embeddings().weight
    for rank in played:
        given = rank["given"][kind]
        assert given.during != classes  # it had been sharded
        assert list(given.after) == list(state)
        assert all(torch.equal(given.after[name], value) for name, value in state.items())
        assert torch.equal(given.logits.nan_to_num(), logits.nan_to_num())
        assert given.blocks == "ModuleList"
        assert given.same_loss_function
        assert given.tied == tied
