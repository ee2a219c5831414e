"""What an `on_load_checkpoint` hook changes in a checkpoint counts in the resumed fit."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_commfree import DistributedLion, DistributedLionStrategy, StreamingDiLoCoStrategy
from lightning_commfree.host import pl
from lightning_commfree.layouts.fsdp import why_unavailable
from lightning_commfree.model.shards import local_tensor
from lightning_commfree.resume.hook_changes import HookChanges
from tests.fit.models import Drawn, Tiny, assert_same, dataset, info_messages, quiet_trainer
from tests.fit.saved import resume_warnings
from tests.world import run_ranks

SAVED, STEPS = 5, 8
HEAD = "head.weight"
OPTIMIZER, EXACT = "optimizer_states", "Resumed exactly"

Edit = Callable[[dict[str, Any]], object]


class Model(Tiny):
    """AdamW or Lion, with a schedule; the module's hook is `edit`."""

    lion, outputs, by_hook = False, 1, True

    def __init__(self, edit: Edit | None = None) -> None:
        super().__init__()
        self.teacher = nn.Linear(3, 1).requires_grad_(False)
        if self.outputs > 1:
            self.head = nn.Linear(6, self.outputs, bias=False)
        self.edit, self.again = edit, self.head  # tied by name alone

    def configure_optimizers(self) -> Any:
        kind: Any = DistributedLion if self.lion else torch.optim.AdamW
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = kind(trained, lr=0.01, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 20], 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.edit is not None and self.by_hook:
            self.edit(checkpoint)


class Voter(Model):
    lion = True


class OfCallback(Model):
    by_hook = False


class Placed(Model):
    """Trains on a loader that knows its place."""


class Wide(Model):
    outputs = 3


class WideVoter(Voter):
    outputs = 3


class OnMeta(Model):
    def __init__(self, edit: Edit | None = None) -> None:
        with torch.device("meta"):
            super().__init__(edit)


class Rows(pl.LightningDataModule):
    """Its state is a note."""

    def __init__(self, place: bool) -> None:
        super().__init__()
        self.place, self.note = place, "as saved"

    def train_dataloader(self) -> Any:
        if self.place:
            return Drawn(lambda random: [torch.rand(2, n, generator=random) for n in (3, 1)], 20, 1)
        return DataLoader(dataset(40), batch_size=2, shuffle=True)

    def state_dict(self) -> dict[str, Any]:
        return {"note": self.note}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.note = state["note"]


class Watch(pl.Callback):
    """Saves after step 5. Notes what the first batch is trained with, and counts its steps."""

    def __init__(self, path: Path) -> None:
        self.path, self.count = path, 0
        self.start: dict[str, Any] = {}
        self.end: dict[str, Tensor] = {}

    def on_load_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: Any) -> None:
        if isinstance(module, OfCallback):
            module.edit(checkpoint)
            if module.edit is zero_module:
                module.head.weight.data.zero_()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, _: int) -> None:
        if self.start:
            return
        names = {p: name for name, p in module.named_parameters()}
        (optimizer,), (config,) = trainer.optimizers, trainer.lr_scheduler_configs
        (group,) = optimizer.param_groups
        self.start = {
            "weights": {n: local_tensor(p).clone() for n, p in module.named_parameters()},
            "states": {
                names[p]: {key: local_tensor(one).clone() for key, one in state.items()}
                for p, state in optimizer.state.items()
                if state
            },
            "lr": group["lr"],
            "weight_decay": group["weight_decay"],
            "schedule": config.scheduler.last_epoch,
            "batch": batch,
            "count": self.count,
            "note": trainer.datamodule.note,
        }
        diloco = getattr(trainer.strategy, "_diloco", None)
        if diloco is not None:
            self.start["step"] = diloco.step
            self.start["outer"] = [one.global_copy.clone() for one in diloco.fragments]
            self.start["local is outer"] = diloco.weight_swap.local_equals_shared()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.count += 1
        if trainer.global_step == SAVED and not self.path.exists():
            trainer.save_checkpoint(self.path)
        self.end = {n: local_tensor(p).clone() for n, p in module.named_parameters()}


def fit(path: Path, module: Model, resumes: bool = True, **settings: Any) -> dict[str, Any]:
    strategy: Any = (
        DistributedLionStrategy()
        if module.lion
        else StreamingDiLoCoStrategy(sync_every=3, num_fragments=2, mix=0.5, **settings)
    )
    watch = Watch(path)
    precision = "bf16-true" if path.name == "bf16.ckpt" else "32-true"
    trainer = quiet_trainer(
        strategy=strategy, devices=2, callbacks=[watch], max_steps=STEPS, precision=precision
    )
    data = Rows(isinstance(module, Placed))
    torch.manual_seed(5)
    error = ""
    with resume_warnings() as warned, info_messages() as said:
        try:
            trainer.fit(module, datamodule=data, ckpt_path=path if resumes else None)
        except (ValueError, RuntimeError) as raised:
            error = str(raised)
    exact = any(EXACT in text for text in said)
    return {
        "start": watch.start,
        "end": watch.end,
        "said": " ".join(warned),
        "exact": exact,
        "error": error,
    }


def set_group(key: str, value: float) -> Edit:
    def edit(checkpoint: dict[str, Any]) -> None:
        for state in checkpoint[OPTIMIZER]:
            for group in state["param_groups"]:
                group[key] = value

    return edit


def zero_head(checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"][HEAD].zero_()


def zero_module(_: dict[str, Any]) -> None:
    """`Watch` changes the module instead."""


def widen_head(checkpoint: dict[str, Any]) -> None:
    for name in (HEAD, "again.weight"):
        checkpoint["state_dict"][name] = torch.full((3, 6), 0.5)
    state = checkpoint[OPTIMIZER][0]["state"]
    widened = [key for key, own in state.items() if own[[*own][-1]].shape == (1, 6)]
    for key in widened:
        del state[key]


def drop_all(checkpoint: dict[str, Any]) -> None:
    for state in checkpoint[OPTIMIZER]:
        state["state"] = {}


def drop_one(checkpoint: dict[str, Any]) -> None:
    del checkpoint[OPTIMIZER][0]["state"][1]  # the bias of `embed`


def zero_momentum(checkpoint: dict[str, Any]) -> None:
    state = checkpoint[OPTIMIZER][0]["state"][1]
    for key in state.keys() & {"exp_avg", "momentum"}:
        state[key] = torch.zeros_like(state[key])


def no_schedule(checkpoint: dict[str, Any]) -> None:
    checkpoint["lr_schedulers"] = []


def later_schedule(checkpoint: dict[str, Any]) -> None:
    checkpoint["lr_schedulers"][0]["last_epoch"] = 19


def rebuild(checkpoint: dict[str, Any]) -> None:
    state = checkpoint["state_dict"]
    checkpoint["state_dict"] = OrderedDict((name, state[name].clone()) for name in reversed(state))
    checkpoint[OPTIMIZER] = deepcopy(checkpoint[OPTIMIZER])


def recount(checkpoint: dict[str, Any]) -> None:
    checkpoint["callbacks"]["Watch"]["count"] = 100


def write_note(checkpoint: dict[str, Any]) -> None:
    checkpoint["Rows"]["note"] = "changed"


def go_back(checkpoint: dict[str, Any]) -> None:
    """Make the loader start with its first batch."""
    random = torch.Generator().manual_seed(1).get_state()
    place = {"done": 0, "random": random}
    checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = [place]


def change_teacher(checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"]["teacher.bias"].fill_(3.0)


def forget(checkpoint: dict[str, Any]) -> None:
    del checkpoint["lightning_commfree"]


def on_one_rank(checkpoint: dict[str, Any]) -> None:
    if torch.distributed.get_rank() == 1:
        zero_head(checkpoint)


LR = set_group("lr", 1e-6)
DECAY = set_group("weight_decay", 0.7)
CASES: dict[str, tuple[type[Model], Edit | None]] = {
    "nothing": (Model, None),
    "lr": (Model, LR),
    "decay by a callback": (OfCallback, DECAY),
    "head": (Model, zero_head),
    "head by a callback": (OfCallback, zero_module),
    "ignored by Lightning": (OfCallback, zero_head),
    "wide head": (Wide, widen_head),
    "teacher": (Model, change_teacher),
    "no states": (Model, drop_all),
    "one state": (Model, drop_one),
    "momentum": (Model, zero_momentum),
    "no schedule": (Model, no_schedule),
    "later schedule": (Model, later_schedule),
    "rebuilt": (Model, rebuild),
    "counter": (Model, recount),
    "note": (Model, write_note),
    "forgotten": (Model, forget),
    "one rank": (Model, on_one_rank),
}
OF_LION = ("nothing", "lr", "head", "wide head", "no states", "one state", "momentum", "one rank")


def play_diloco(rank: int, size: int, folder: Path) -> dict[str, Any]:
    path = folder / "diloco.ckpt"
    found = {"straight": fit(path, Model(), resumes=False)}
    for name, (make, edit) in CASES.items():
        found[name] = fit(path, make(edit))
    fit(folder / "placed.ckpt", Placed(), resumes=False)
    for name, edit in (("in place", None), ("back", go_back)):
        found[name] = fit(folder / "placed.ckpt", Placed(edit))
    return found


def play_lion(rank: int, size: int, folder: Path) -> dict[str, Any]:
    path = folder / "lion.ckpt"
    straight = fit(path, Voter(), resumes=False)
    found = {"straight": straight}
    for name in OF_LION:
        make = WideVoter if name == "wide head" else Voter
        found[name] = fit(path, make(CASES[name][1]))
    fit(folder / "bf16.ckpt", Voter(), resumes=False)
    found["bf16"] = fit(folder / "bf16.ckpt", Voter(zero_head))
    return found


@pytest.fixture(scope="module")
def diloco(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("diloco")
    return run_ranks(play_diloco, 2, folder, folder)


@pytest.fixture(scope="module")
def lion(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("lion")
    return run_ranks(play_lion, 2, folder, folder)


@contextmanager
def differing(found: Any, name: str, *keys: str) -> Iterator[tuple[Any, Any]]:
    """Yield what a fit starts with, with and without a hook; only `keys` may differ.

    Afterwards, the fit has not called itself exact, and has named the hook.
    """
    run, plain = found[name], found["nothing"]
    assert not plain["said"]
    assert not run["error"]
    start, usual = run["start"], plain["start"]
    yield start, usual
    assert_same(
        {k: start[k] for k in start if k not in keys}, {k: usual[k] for k in start if k not in keys}
    )
    assert not run["exact"]
    assert "`on_load_checkpoint` changed" in run["said"], run["said"]


@pytest.mark.parametrize("kind", ["diloco", "lion"])
def test_a_hook_that_changes_nothing_resumes_exactly(
    kind: str, request: pytest.FixtureRequest
) -> None:
    ranks = request.getfixturevalue(kind)
    for found in ranks:
        assert_same(found["nothing"]["end"], found["straight"]["end"])
        assert not found["nothing"]["said"]
    (first, second) = ranks
    state = [one["nothing"]["start"]["states"]["embed.bias"] for one in (first, second)]
    momentum = [one.get("exp_avg", one.get("momentum")) for one in state]
    assert not torch.equal(*momentum), "each rank has its own"


def test_rebuilt_entries_and_changes_that_lightning_ignores_resume_exactly(diloco: Any) -> None:
    for found in diloco:
        for name in ("rebuilt", "ignored by Lightning"):
            assert_same(found[name]["end"], found["straight"]["end"])
            assert not found[name]["said"]


@pytest.mark.parametrize("kind", ["diloco", "lion"])
def test_a_learning_rate_counts_and_all_else_is_the_ranks_own(
    kind: str, request: pytest.FixtureRequest
) -> None:
    for found in request.getfixturevalue(kind):
        with differing(found, "lr", "lr") as (start, usual):
            assert (start["lr"], usual["lr"]) == (1e-6, 0.005)
        assert f"{OPTIMIZER}[0]['param_groups'][0]['lr']" in found["lr"]["said"]


def test_a_callbacks_weight_decay_counts(diloco: Any) -> None:
    for found in diloco:
        with differing(found, "decay by a callback", "weight_decay") as (start, _):
            assert start["weight_decay"] == 0.7


@pytest.mark.parametrize("kind", ["diloco", "lion"])
def test_dropped_and_zeroed_optimizer_states_stay_so(
    kind: str, request: pytest.FixtureRequest
) -> None:
    for found in request.getfixturevalue(kind):
        with differing(found, "no states", "states") as (start, _):
            assert start["states"] == {}
        with differing(found, "one state", "states") as (start, usual):
            assert "embed.bias" not in start["states"]
            rest = {n: one for n, one in usual["states"].items() if n != "embed.bias"}
            assert_same({n: start["states"][n] for n in rest}, rest)
        with differing(found, "momentum", "states") as (start, usual):
            own, before = start["states"]["embed.bias"], usual["states"].pop("embed.bias")
            key = "momentum" if "momentum" in own else "exp_avg"
            assert before[key].any()
            assert not own[key].any()
            assert_same({**own, key: before[key]}, before)
            assert_same({n: start["states"][n] for n in usual["states"]}, usual["states"])
            usual["states"]["embed.bias"] = before


def test_schedules_count(diloco: Any) -> None:
    for found in diloco:
        with differing(found, "no schedule", "schedule") as (start, usual):
            assert (start["schedule"], usual["schedule"]) == (0, SAVED)
        with differing(found, "later schedule", "schedule") as (start, _):
            assert start["schedule"] == 19


CHANGED = ("weights", "step", "outer", "local is outer")


@pytest.mark.parametrize("name", ["head", "head by a callback", "wide head"])
def test_new_weights_reach_the_global_copies(diloco: Any, name: str) -> None:
    for found in diloco:
        also = ("states",) if name == "wide head" else ()
        with differing(found, name, *CHANGED, *also) as (start, usual):
            head = start["weights"][HEAD]
            assert (head == (0.5 if name == "wide head" else 0.0)).all()
            assert start["local is outer"]
            assert not usual["local is outer"]
            assert start["step"] == 0, "the exchanges start over"
            assert_same({**start["states"], HEAD: 0}, {**usual["states"], HEAD: 0})
        assert "head.weight" in found[name]["said"]
        assert "starts from the checkpoint's weights" in found[name]["said"]
    one, other = (found[name]["start"] for found in diloco)
    assert_same(one["weights"], other["weights"])
    assert_same(diloco[0][name]["end"], diloco[1][name]["end"])


def test_an_untrained_tensor_changes_alone(diloco: Any) -> None:
    for found in diloco:
        with differing(found, "teacher", "weights") as (start, usual):
            assert (start["weights"]["teacher.bias"] == 3).all()
            assert_same(
                {**start["weights"], "teacher.bias": 0}, {**usual["weights"], "teacher.bias": 0}
            )


def test_the_states_of_callbacks_data_and_loaders_count(diloco: Any) -> None:
    first = torch.rand(2, 3, generator=torch.Generator().manual_seed(1))
    for found in diloco:
        assert found["note"]["start"]["note"] == "changed"
        assert found["nothing"]["start"]["note"] == "as saved"
        assert torch.equal(found["back"]["start"]["batch"][0], first)
        assert not torch.equal(found["in place"]["start"]["batch"][0], first)
        with differing(found, "counter", "count") as (start, usual):
            assert (start["count"], usual["count"]) == (100, SAVED)


def test_without_our_entry_nothing_of_a_rank_is_restored(diloco: Any) -> None:
    for found in diloco:
        assert "it has no per-rank state" in found["forgotten"]["said"]
        assert found["forgotten"]["start"]["step"] == 0


@pytest.mark.parametrize("kind", ["diloco", "lion"])
def test_a_change_on_one_rank_is_refused_on_all(kind: str, request: pytest.FixtureRequest) -> None:
    for found in request.getfixturevalue(kind):
        error = found["one rank"]["error"]
        assert "the change of state_dict['head.weight'] by `on_load_checkpoint`" in error
        assert "is made on rank 1, absent on rank 0" in error


@pytest.mark.parametrize("name", ["head", "wide head"])
def test_new_weights_count_under_lion(lion: Any, name: str) -> None:
    for found in lion:
        also = ("states",) if name == "wide head" else ()
        with differing(found, name, "weights", *also) as (start, usual):
            assert (start["weights"][HEAD] == (0.5 if name == "wide head" else 0.0)).all()
            assert_same({**start["weights"], HEAD: 0}, {**usual["weights"], HEAD: 0})
            assert_same({**start["states"], HEAD: 0}, {**usual["states"], HEAD: 0})


def test_new_weights_reach_the_master_copies_of_lion(lion: Any) -> None:
    for found in lion:
        start, end = found["bf16"]["start"], found["bf16"]["end"]
        assert not start["weights"][HEAD].any()
        assert not start["states"][HEAD]["master"].any()
        # three steps from 0
        assert 0 < end[HEAD].abs().max() < 0.05


WHY_NOT = why_unavailable()
OF_FSDP = ("nothing", "lr", "head", "one state", "momentum")


def play_fsdp(rank: int, size: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for make in (Model, OnMeta):  # a model on `meta` is restored after it is sharded
        path = folder / f"{make.__name__}.ckpt"
        fit(path, make(), resumes=False, replica_size=2, inside="fsdp")
        for name in OF_FSDP:
            run = fit(path, make(CASES[name][1]), replica_size=2, inside="fsdp")
            found.setdefault(make.__name__, {})[name] = run
    return found


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_changes_count_where_ranks_hold_shards(tmp_path: Path) -> None:
    for ranks in run_ranks(play_fsdp, 2, tmp_path, tmp_path):
        for found in ranks.values():
            with differing(found, "lr", "lr") as (start, _):
                assert start["lr"] == 1e-6
            with differing(found, "head", *CHANGED) as (start, _):
                assert not start["weights"][HEAD].any()
                assert start["local is outer"]
            with differing(found, "one state", "states") as (start, usual):
                assert {*usual["states"]} - {*start["states"]} == {"embed.bias"}
            with differing(found, "momentum", "states") as (start, usual):
                own, before = start["states"]["embed.bias"], usual["states"]["embed.bias"]
                assert not own["exp_avg"].any()
                assert torch.equal(own["exp_avg_sq"], before["exp_avg_sq"])


def changes_of(state: dict[str, Any], edit: Edit) -> HookChanges:
    changes = HookChanges(state, "MixedPrecision")
    edit(state)
    changes.compare_weights()
    changes.compare()
    return changes


def test_renamed_and_tied_weights_are_no_change() -> None:
    def edit(checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state["a"] = state.pop("compiled.a")
        state["tied"] = state["b"]

    weights = {"compiled.a": torch.rand(3), "b": torch.rand(3), "extra": {"version": 1}}
    assert str(changes_of({"state_dict": weights}, edit)) == ""

    def swap(checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state["a"], state["b"], state["extra"] = state["b"], state["a"], {"version": 2}
        del state["tied"]

    changed = changes_of({"state_dict": weights}, swap)
    assert changed.weights == {"a", "b", "extra", "tied"}
    assert str(changed).endswith("state_dict['extra'] and 1 more")


def test_only_what_a_hook_changes_replaces_a_ranks_own_state() -> None:
    def state(value: float) -> dict[str, Any]:
        milestones = Counter({2: 1, 20: 1})
        best = {"best": float("nan"), "milestones": milestones, "betas": (value, 0.9)}
        return {**best, "lrs": [value, value], "metrics": [value], "by_rank": {"a": value}}

    def edit(checkpoint: dict[str, Any]) -> None:
        (entry,) = checkpoint["lr_schedulers"]
        entry["milestones"][20] = 2
        entry["lrs"][1] = 7.0
        entry["metrics"].append(8.0)
        entry["by_rank"]["new"] = 9.0
        del entry["by_rank"]["a"]
        checkpoint["MixedPrecision"] = {"scale": 2.0}

    changes = changes_of({"lr_schedulers": [state(0.1)]}, edit)
    (merged,) = changes.keep("lr_schedulers", [{**state(0.2), "of rank 1": 5}])
    assert merged.pop("best") != merged.pop("of rank 1")
    assert merged == {
        "milestones": Counter({2: 1, 20: 2}),
        "betas": (0.2, 0.9),
        "lrs": [0.2, 7.0],
        "metrics": [0.1, 8.0],
        "by_rank": {"new": 9.0},
    }
    assert isinstance(merged["milestones"], Counter)
    assert changes.keep("MixedPrecision", {"scale": 3.0}) == {"scale": 2.0}
