"""Who may change weights, and when: the rows of the table in docs/own_module.md, in their order.

Each row is played under Streaming DiLoCo and Distributed Lion, on two ranks.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_commfree import DistributedLion, DistributedLionStrategy, StreamingDiLoCoStrategy
from tests.fit.models import Tiny, assert_same, loader, quiet_trainer, rank_loader
from tests.mortal import run_jobs, start_mortals
from tests.world import run_ranks

KINDS = ("diloco", "lion")
STEPS, BOUND = 12, 0.05
TIMEOUT = timedelta(seconds=60)


@dataclass
class Outcome:
    """What one rank saw of a fit."""

    error: str = ""
    weights: dict[str, Tensor] = field(default_factory=dict)
    sent: int = 0  # bytes in training steps
    said: list[str] = field(default_factory=list)
    seen: Any = None  # what the module kept for the test


class Net(Tiny):
    """`Tiny` with the optimizer of its strategy."""

    kind, seen = "diloco", None

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(p for p in self.parameters() if p.requires_grad)

    def make_optimizer(self, parameters: Any) -> Any:
        if self.kind == "lion":
            return DistributedLion(parameters, lr=0.02)
        return torch.optim.AdamW(parameters, lr=self.lr)


def play(
    rank: int, size: int, kind: str, folder: Path, names: Collection[str]
) -> dict[str, Outcome]:
    outcomes = {}
    for name, make in MODULES.items():
        if name in names:
            outcomes[name] = fit(rank, size, kind, make(), folder / name, **ARGUMENTS.get(name, {}))
    return outcomes


def fit(rank: int, size: int, kind: str, module: Any, folder: Path, **arguments: Any) -> Outcome:
    if kind == "lion":
        strategy: Any = DistributedLionStrategy(timeout=TIMEOUT)
    else:
        strategy = StreamingDiLoCoStrategy(sync_every=4, wire_dtype="fp32", timeout=TIMEOUT)
    module.kind, outcome = kind, Outcome()
    last = ModelCheckpoint(folder, save_last=True)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        callbacks=[last],
        enable_checkpointing=True,
        num_sanity_val_steps=0,
        **{
            "max_steps": STEPS,
            "max_epochs": -1,
            "val_check_interval": 5,
            "check_val_every_n_epoch": None,
            **arguments,
        },
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, rank_loader(4 * STEPS, 2, rank, size), loader(4))
        except (RuntimeError, TypeError, ValueError) as error:
            outcome.error = str(error)
    outcome.weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    outcome.sent = sum(strategy.ledger.bytes_by_phase["steps"].values())
    outcome.said, outcome.seen = [str(one.message) for one in caught], module.seen
    return outcome


MODULES: dict[str, Callable[[], Any]] = {}
FAILS = {  # names of the fits that end with an error
    "diloco": {
        "left out by hand",
        "written in validation",
        "frozen on one rank",
        "loaded on one",
        "modes",
        "new head",
    },
    "lion": {
        "hidden optimizer",
        "by hand in a hook",
        "differs at the end",
        "left out on one",
        "manual",
        "max_norm",
        "loaded on one",
        "modes",
    },
}
# names of the fits that are played with one strategy only: Lion refuses manual optimization
NOT_PLAYED = {
    "diloco": {"by hand in a hook"},
    "lion": {"manual, raw", "SAM", "left out by hand", "by hand"},
}
ARGUMENTS: dict[str, dict[str, Any]] = {}


def played_as(name: str, **arguments: Any) -> Callable[[type], type]:
    """Register a module for `play`, with arguments for its Trainer."""

    def register(kind: type) -> type:
        MODULES[name], ARGUMENTS[name] = kind, arguments
        return kind

    return register


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Outcome]]]:
    found = {}
    for kind in KINDS:
        folder, fails = tmp_path_factory.mktemp(f"changes-{kind}-"), FAILS[kind]
        names = MODULES.keys() - fails - NOT_PLAYED[kind]
        found[kind] = run_ranks(play, 2, folder, kind, folder, names)
        jobs = [  # an error ends a rank's process group
            partial(start_mortals, play, 2, tmp_path_factory.mktemp("fails"), kind, folder, {name})
            for name in fails
        ]
        for ends in run_jobs(jobs):
            for rank, end in zip(found[kind], ends, strict=True):
                rank |= end.result
    return found


def both(ranks: Any, kind: str, name: str) -> tuple[Outcome, Outcome]:
    """Return the ranks' outcomes of a fit that ends well, with the same weights on both."""
    one, other = (rank[name] for rank in ranks[kind])
    assert (one.error, other.error) == ("", "")
    assert_same(one.weights, other.weights)
    return one, other


# -- a step that Lightning does not see

MODULES["plain"] = Net


@played_as("inner")
class Inner(Net):
    def optimizer_step(self, epoch: Any, batch: Any, optimizer: Any, closure: Any) -> None:
        optimizer.optimizer.step(closure)


@played_as("of the Trainer")
class OfTrainer(Net):
    def optimizer_step(self, epoch: Any, batch: Any, optimizer: Any, closure: Any) -> None:
        closure()
        self.trainer.optimizers[0].step()


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, _: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=self.seen is None)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@played_as("manual, raw", max_steps=-1, max_epochs=1)
class ManualRaw(Manual):
    seen = "steps the optimizer itself"


MODULES["manual"] = Manual
ARGUMENTS["manual"] = ARGUMENTS["manual, raw"]


class SAM(torch.optim.Optimizer):
    """As davda54/sam: two half-steps, of which the second steps an inner optimizer."""

    def __init__(self, parameters: Any, base: Any, rho: float = 0.05) -> None:
        super().__init__(parameters, {"rho": rho})
        self.base = base(self.param_groups)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["old"] = p.clone()
            p.add_(p.grad, alpha=self.param_groups[0]["rho"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.copy_(self.state[p]["old"])
        self.base.step()
        self.zero_grad()


@played_as("SAM", max_steps=-1, max_epochs=1)
class Sharp(Manual):
    def training_step(self, batch: Any, _: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.manual_backward(self.loss(batch))
        optimizer.first_step()
        self.manual_backward(self.loss(batch))
        optimizer.second_step()

    def make_optimizer(self, parameters: Any) -> Any:
        return SAM(parameters, torch.optim.AdamW)


@pytest.mark.parametrize(
    ("kind", "raw", "same"),
    [
        *((kind, raw, "plain") for kind in KINDS for raw in ("inner", "of the Trainer")),
        ("diloco", "manual, raw", "manual"),
    ],
)
def test_a_raw_step_is_exchanged_like_one_of_lightnings(
    ranks: Any, kind: str, raw: str, same: str
) -> None:
    for found, expected in zip(both(ranks, kind, raw), both(ranks, kind, same), strict=True):
        assert found.sent == expected.sent > 0
        assert_same(found.weights, expected.weights)


def test_the_inner_optimizer_of_a_wrapper_counts(ranks: Any) -> None:
    replicas = (both(ranks, "diloco", name) for name in ("SAM", "manual"))
    for found, plain in zip(*replicas, strict=True):
        assert found.sent == plain.sent > 0


@played_as("hidden optimizer")
class Hidden(Net):
    """An optimizer that `configure_optimizers` does not return."""

    def configure_optimizers(self) -> Any:
        self.__dict__["hidden"] = self.make_optimizer(self.head.parameters())
        return self.make_optimizer([*self.embed.parameters(), *self.blocks.parameters()])

    def on_train_batch_end(self, *_: Any) -> None:
        self.__dict__["hidden"].step()

    def on_train_end(self) -> None:
        self.seen = getattr(self.trainer.strategy, "fragments", None), self.trainer.global_step


def test_parameters_of_a_hidden_optimizer_become_a_fragment(ranks: Any) -> None:
    for found in both(ranks, "diloco", "hidden optimizer"):
        fragments, steps = found.seen
        assert fragments[-1] == ["head.weight"]
        assert not any("head.weight" in names for names in fragments[:-1])
        assert steps == STEPS


def test_a_hidden_optimizer_of_a_worker_is_an_error(ranks: Any) -> None:
    for rank in ranks["lion"]:
        assert rank["hidden optimizer"].error.startswith(
            "`DistributedLion` steps parameters of the module, but `configure_optimizers` did not"
        )


# -- a step that is left out


class LeavesOut(Net):
    def __init__(self, *ranks: int) -> None:
        super().__init__()
        self.ranks = ranks

    def optimizer_step(self, epoch: Any, batch: Any, optimizer: Any, closure: Any) -> None:
        if batch == 5 and self.global_rank in self.ranks:
            closure()
        else:
            optimizer.step(closure=closure)


MODULES |= {"left out on one": lambda: LeavesOut(1), "left out on both": lambda: LeavesOut(0, 1)}


def test_replicas_stay_together_if_one_leaves_out_a_step(ranks: Any) -> None:
    for found in both(ranks, "diloco", "left out on one"):
        assert found.sent == ranks["diloco"][0]["plain"].sent


def test_a_worker_that_leaves_out_a_step_is_named(ranks: Any) -> None:
    for rank in ranks["lion"]:
        assert rank["left out on one"].error.startswith(
            "An optimizer step was left out (`optimizer_step` did not call `optimizer.step`) on"
            " rank 1 after step 5; on rank 0 that did not happen, and step 6 has begun there."
        )


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_may_leave_out_a_step(ranks: Any, kind: str) -> None:
    both(ranks, kind, "left out on both")


@played_as("left out by hand", max_steps=-1, max_epochs=1, limit_val_batches=0)
class LeavesOutByHand(Manual):
    def training_step(self, batch: Any, i: int) -> None:
        if i != 2 or self.global_rank == 0:
            super().training_step(batch, i)


def test_a_batch_without_a_step_on_one_replica_is_named_at_the_next_landing(ranks: Any) -> None:
    """With manual optimization nobody knows whether a step was due."""
    for rank in ranks["diloco"]:
        error = rank["left out by hand"].error
        assert "replica 0 (rank 0) had taken 4 steps and left out 0" in error
        assert "replica 1 (rank 1) had taken 4 steps and left out 1" in error


def test_manual_optimization_of_a_worker_is_refused(ranks: Any) -> None:
    for rank in ranks["lion"]:
        assert rank["manual"].error.startswith(
            "`DistributedLionStrategy` does not support manual optimization"
        )
        assert rank["manual"].sent == 0


# -- weights that no optimizer changes


@played_as("by hand", max_steps=-1, max_epochs=1)
class ByHand(Manual):
    def training_step(self, batch: Any, _: int) -> None:
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for p in self.parameters():
                p.sub_(p.grad, alpha=0.1)
                p.grad = None


@played_as("by hand in a hook", max_steps=-1, max_epochs=1)
class ByHandInHook(Net):
    def optimizer_step(self, epoch: Any, batch: Any, optimizer: Any, closure: Any) -> None:
        closure()
        with torch.no_grad():
            for p in self.parameters():
                p.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize(("kind", "name"), [("diloco", "by hand"), ("lion", "by hand in a hook")])
def test_a_fit_in_which_no_step_is_counted_says_so(ranks: Any, kind: str, name: str) -> None:
    said = ranks[kind][0][name].said
    assert sum("weights have changed since the fit began, but no optimizer" in s for s in said) == 1
    plain = ranks[kind][0]["plain"].said
    assert not any("no optimizer step was counted" in text for text in plain)


# -- hooks between steps


class Clamped(Net):
    """WGAN's clamp, through `.data` as in its reference code."""

    def clamp(self) -> None:
        with torch.no_grad():
            self.seen = [*(self.seen or []), max(float(p.abs().max()) for p in self.parameters())]
            for p in self.parameters():
                p.data.clamp_(-BOUND, BOUND)


@played_as(
    "clamped in a hook",
    max_steps=-1,
    max_epochs=1,
    val_check_interval=1.0,
    check_val_every_n_epoch=1,
)
class ClampedInHook(Clamped):
    def on_train_batch_end(self, *_: Any) -> None:
        self.clamp()


@played_as("clamped in the step")
class ClampedInStep(Clamped):
    def optimizer_step(self, epoch: Any, batch: Any, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure=closure)
        self.clamp()


@played_as("clamped in bf16", precision="bf16-true")
class ClampedInBf16(ClampedInHook):
    pass


@played_as("scaled on each rank", max_steps=-1, max_epochs=1)
class ScaledLast(Net):
    """Changes the weights after the last step, differently on each rank."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.is_last_batch and self.kind == "diloco":
            with torch.no_grad():
                self.head.weight.copy_(torch.full_like(self.head.weight, 1.0 + self.global_rank))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["clamped in a hook", "clamped in the step", "clamped in bf16"])
def test_weights_may_be_clamped_after_each_step(ranks: Any, kind: str, name: str) -> None:
    bound = torch.tensor(BOUND, dtype=torch.bfloat16 if "bf16" in name else torch.float32)
    for found in both(ranks, kind, name):
        assert max(float(p.abs().max()) for p in found.weights.values()) == bound
        # one step moves a weight by some learning rates; bf16's fp32 copy would undo the clamp
        assert max(found.seen[1:]) < 0.3 < found.seen[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_checkpoint_contains_the_clamped_weights(
    ranks: Any, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (path,) = tmp_path_factory.getbasetemp().glob(f"changes-{kind}-0/clamped in a hook/last.ckpt")
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert_same(saved, ranks[kind][0]["clamped in a hook"].weights)


def test_weights_changed_differently_after_the_last_step_are_averaged(ranks: Any) -> None:
    for found in both(ranks, "diloco", "scaled on each rank"):
        head = found.weights["head.weight"]
        assert torch.allclose(head, torch.full_like(head, 1.5))


# -- `eval()` and `train()`


class Adapted(nn.Linear):
    """As loralib's: `eval()` merges the adapters into the weight, and `train()` takes them out."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__(width, rows, bias=False)
        self.weight.requires_grad_(False)
        self.a = nn.Parameter(0.3 * torch.randn(2, width))
        self.b = nn.Parameter(torch.zeros(rows, 2))
        self.merged = False

    def train(self, mode: bool = True) -> Adapted:
        super().train(mode)
        if mode == self.merged:
            delta = self.b.data @ self.a.data
            self.weight.data += -delta if mode else delta
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.weight)
        return y if self.merged else y + x @ self.a.T @ self.b.T


@played_as("merged adapters")
class WithAdapters(Net):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.embed = Adapted(3, 6)
        self.start = self.embed.weight.clone()

    def on_validation_model_train(self) -> None:
        self.train()  # Lightning restores the flags without a call of `train`

    def on_fit_end(self) -> None:
        self.seen = float((self.embed.weight - self.start).abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_merged_for_validation_leave_the_frozen_weight(ranks: Any, kind: str) -> None:
    for found in both(ranks, kind, "merged adapters"):
        assert found.seen < 1e-6  # rounding; with other adapters than were merged, 1e-2


# -- validation


@played_as("written in validation")
class WrittenInValidation(Net):
    def on_validation_epoch_end(self) -> None:
        with torch.no_grad():
            self.head.weight.zero_()


@played_as("restored in validation")
class RestoredInValidation(Net):
    def on_validation_start(self) -> None:
        self.kept = copy.deepcopy(self.state_dict())
        self.load_state_dict({name: 0.5 * value for name, value in self.kept.items()})

    def on_validation_end(self) -> None:
        self.load_state_dict(self.kept)


def test_outer_weights_written_in_validation_are_an_error(ranks: Any) -> None:
    for rank in ranks["diloco"]:
        error = rank["written in validation"].error
        assert error.startswith("The parameters ['head.weight'] were modified while the module")
    both(ranks, "lion", "written in validation")  # all ranks do the same: as under DDP


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_may_validate_with_other_weights(ranks: Any, kind: str) -> None:
    for found, plain in zip(
        both(ranks, kind, "restored in validation"), both(ranks, kind, "plain"), strict=True
    ):
        assert_same(found.weights, plain.weights)
        assert not any("were loaded in the middle" in text for text in found.said)


@played_as("max_norm")
class Renormed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 6, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.abs().sum(1).long() % 5
        return super().forward(x) + self.table(rows).sum(1, keepdim=True)


def test_an_embedding_that_rescales_itself_is_trained_or_refused(ranks: Any) -> None:
    for found in both(ranks, "diloco", "max_norm"):
        assert float(found.weights["table.weight"].norm(dim=1).max()) > 0.0
    for rank in ranks["lion"]:
        assert re.search(
            "does not support `max_norm=0.5` of the embedding 'table'", rank["max_norm"].error
        )


# -- frozen, unfrozen and unowned parameters


@played_as("frozen later")
class FrozenLater(Net):
    def on_train_batch_start(self, batch: Any, i: int) -> None:
        self.blocks.requires_grad_(i < 5)

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen = [
            *(self.seen or []),
            {n: p.detach().clone() for n, p in self.blocks.named_parameters()},
        ]


@played_as("frozen on one rank")
class FrozenOnOne(Net):
    def on_train_batch_start(self, batch: Any, i: int) -> None:
        self.embed.requires_grad_(i < 5 or self.global_rank == 0)


@played_as("unfrozen later")
class UnfrozenLater(Net):
    def configure_optimizers(self) -> Any:
        self.blocks.requires_grad_(False)
        return super().configure_optimizers()

    def on_train_batch_start(self, batch: Any, i: int) -> None:
        if i == 5:
            self.blocks.requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": [*self.blocks.parameters()]})


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_frozen_later_settle_and_stay(ranks: Any, kind: str) -> None:
    """They are frozen after 5 steps; their two fragments launch after 8 and 9 and land then."""
    one, other = both(ranks, kind, "frozen later")
    settled = 9 if kind == "diloco" else 4
    for found in (one, other):
        for later in found.seen[settled + 1 :]:
            assert_same(later, found.seen[settled])
        assert_same(
            {f"blocks.{n}": p for n, p in found.seen[-1].items()},
            {n: p for n, p in found.weights.items() if n.startswith("blocks.")},
        )
    assert_same(one.seen[settled], other.seen[settled])
    moved = [not torch.equal(one.seen[0][name], p) for name, p in one.seen[settled].items()]
    assert all(moved), "they were trained before"


def test_a_parameter_frozen_on_one_replica_is_an_error(ranks: Any) -> None:
    for rank in ranks["diloco"]:
        assert rank["frozen on one rank"].error.startswith(
            "The replicas froze or unfroze different parameters"
        )
    both(ranks, "lion", "frozen on one rank")  # the other workers' votes count


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_added_to_an_optimizer_are_trained(ranks: Any, kind: str) -> None:
    start = Net()
    for found in both(ranks, kind, "unfrozen later"):
        for name, before in start.named_parameters():
            assert not torch.equal(found.weights[name], before), name


@played_as("averaged model")
class WithAverage(Net):
    """A submodule that no optimizer holds, although its parameters require gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = AveragedModel(self.embed, avg_fn=lambda old, new, _: 0.5 * old + 0.5 * new)
        assert all(p.requires_grad for p in self.teacher.parameters())
        self.seen = None

    def make_optimizer(self, parameters: Any) -> Any:
        student = [p for n, p in self.named_parameters() if not n.startswith("teacher.")]
        return super().make_optimizer(student)

    def on_train_batch_end(self, *_: Any) -> None:
        self.teacher.update_parameters(self.embed)
        if self.trainer.global_step < STEPS:  # the last one is averaged with the fit's end
            self.seen = [p.detach().clone() for p in self.teacher.parameters()]


def test_a_model_that_no_optimizer_holds_is_not_trained(ranks: Any) -> None:
    one, other = both(ranks, "lion", "averaged model")
    assert_same(one.seen, other.seen)


def test_the_averaged_model_of_replicas_is_the_mean_of_their_averages(ranks: Any) -> None:
    one, other = both(ranks, "diloco", "averaged model")
    names = [name for name in one.weights if name.startswith("teacher.module.")]
    for name, first, second in zip(names, one.seen, other.seen, strict=True):
        # the average after the last step also contains half of the final weights
        final = one.weights[name.replace("teacher.module", "embed")]
        expected = (0.5 * (first + second) + final) / 2
        assert torch.allclose(one.weights[name], expected, atol=1e-5), name


# -- loaded weights


class Reloads(Net):
    """Returns to its first weights in the middle of the fit, and trains no more."""

    def __init__(self, *ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.first = copy.deepcopy(self.state_dict())

    def on_train_batch_start(self, batch: Any, i: int) -> None:
        if i == 6 and self.global_rank in self.ranks:
            self.load_state_dict(self.first)
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] = 0.0


MODULES |= {"loaded on both": lambda: Reloads(0, 1), "loaded on one": lambda: Reloads(1)}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_loaded_on_all_ranks_stay(ranks: Any, kind: str) -> None:
    start = Net()
    for found in both(ranks, kind, "loaded on both"):
        assert_same(found.weights, {n: p.detach() for n, p in start.named_parameters()})
    said = [text for text in ranks["diloco"][0]["loaded on both"].said if "were loaded" in text]
    assert len(said) == 1


def test_weights_loaded_on_one_rank_are_an_error(ranks: Any) -> None:
    for rank in ranks["diloco"]:
        assert rank["loaded on one"].error.startswith(
            "Weights were loaded (`load_state_dict`) on rank 1 after step 6; on rank 0 that did not"
        )
    for rank in ranks["lion"]:
        assert "different learning rates" in rank["loaded on one"].error


@played_as("new head")
class NewHead(Net):
    def on_train_batch_start(self, batch: Any, i: int) -> None:
        if i == 5:
            self.head = nn.Linear(6, 1, bias=False)


def test_a_parameter_that_is_replaced_is_an_error(ranks: Any) -> None:
    """The new one would be mixed with the old one's global copy."""
    for rank in ranks["diloco"]:
        assert rank["new head"].error.startswith(
            "The parameters ['head.weight'] were replaced during the fit"
        )
    both(ranks, "lion", "new head")  # no optimizer holds it: as under DDP


@played_as("differs at the end", limit_val_batches=0)
class DiffersAtEnd(Net):
    def on_train_batch_end(self, *_: Any) -> None:
        if self.kind == "lion" and self.global_rank == 1:
            with torch.no_grad():
                self.head.weight.add_(1e-3)


def test_workers_that_differ_after_a_short_fit_are_an_error(ranks: Any) -> None:
    """The votes compare weights every 100 steps."""
    for rank in ranks["lion"]:
        assert "Weights that must be equal on ranks 0, 1 differ" in rank["differs at the end"].error


def test_copies_of_a_module_are_not_watched(tmp_path: Path) -> None:
    run_ranks(copies, 1, tmp_path, tmp_path)


def copies(rank: int, size: int, folder: Path) -> None:
    class Copies(Net):
        def on_train_batch_end(self, *_: Any) -> None:
            twin = copy.deepcopy(self.embed)
            twin.load_state_dict({name: 0 * p for name, p in twin.state_dict().items()})
            torch.save(self.embed, folder / "embed.pt")

    assert fit(rank, size, "diloco", Copies(), folder, max_steps=3).error == ""


# -- optimizers with modes


class Modes(torch.optim.SGD):
    """As those of `schedulefree`."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


@played_as("modes")
class WithModes(Net):
    def make_optimizer(self, parameters: Any) -> Any:
        return Modes(parameters, 0.1)


def test_an_optimizer_that_swaps_weights_is_refused(ranks: Any) -> None:
    for rank in ranks["diloco"]:
        assert "does not support `Modes`: it keeps a second set" in rank["modes"].error
    for rank in ranks["lion"]:
        assert "requires `DistributedLion`, but `configure_optimizers`" in rank["modes"].error


# -- the page

PLAYED = {  # the beginning of a row: the tests that play it
    "an optimizer that Lightning does not step": (
        test_a_raw_step_is_exchanged_like_one_of_lightnings,
        test_the_inner_optimizer_of_a_wrapper_counts,
    ),
    "an optimizer that `configure_optimizers` does not return": (
        test_parameters_of_a_hidden_optimizer_become_a_fragment,
        test_a_hidden_optimizer_of_a_worker_is_an_error,
    ),
    "`optimizer_step` that leaves out a step": (
        test_replicas_stay_together_if_one_leaves_out_a_step,
        test_a_worker_that_leaves_out_a_step_is_named,
        test_all_ranks_may_leave_out_a_step,
    ),
    "`training_step` with manual optimization": (
        test_a_batch_without_a_step_on_one_replica_is_named_at_the_next_landing,
        test_manual_optimization_of_a_worker_is_refused,
    ),
    "code without an optimizer": (test_a_fit_in_which_no_step_is_counted_says_so,),
    "a hook that clamps": (
        test_weights_may_be_clamped_after_each_step,
        test_the_last_checkpoint_contains_the_clamped_weights,
        test_weights_changed_differently_after_the_last_step_are_averaged,
        test_workers_that_differ_after_a_short_fit_are_an_error,
    ),
    "`eval()` and `train()`": (test_adapters_merged_for_validation_leave_the_frozen_weight,),
    "a hook that validates": (
        test_outer_weights_written_in_validation_are_an_error,
        test_a_hook_may_validate_with_other_weights,
    ),
    "`nn.Embedding(max_norm=...)`": (test_an_embedding_that_rescales_itself_is_trained_or_refused,),
    "`requires_grad_(False)`": (
        test_parameters_frozen_later_settle_and_stay,
        test_a_parameter_frozen_on_one_replica_is_an_error,
    ),
    "`requires_grad_(True)`": (test_parameters_added_to_an_optimizer_are_trained,),
    "code that updates parameters": (
        test_a_model_that_no_optimizer_holds_is_not_trained,
        test_the_averaged_model_of_replicas_is_the_mean_of_their_averages,
    ),
    "`load_state_dict`": (
        test_weights_loaded_on_all_ranks_stay,
        test_weights_loaded_on_one_rank_are_an_error,
    ),
    "code that replaces a parameter": (test_a_parameter_that_is_replaced_is_an_error,),
    "an optimizer that swaps weights": (test_an_optimizer_that_swaps_weights_is_refused,),
}


def test_each_row_of_the_page_is_played() -> None:
    page = (Path(__file__).parents[2] / "docs" / "own_module.md").read_text()
    table = page.partition("## Who may change weights")[2].partition("\n## ")[0]
    rows = [line[2:] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(PLAYED)
    for row, name in zip(rows, PLAYED, strict=True):
        assert row.startswith(name)
