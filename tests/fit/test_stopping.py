"""`trainer.should_stop` or SIGTERM on some ranks stops all of them after the same step, with the
same weights: with the next exchange, or at once where all ranks are at the same place."""

from __future__ import annotations

import os
import signal
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_commfree import (
    DistributedLion,
    DistributedLionStrategy,
    DominoTPStrategy,
    StreamingDiLoCoStrategy,
)
from lightning_commfree.host import ModelCheckpoint, SIGTERMException, pl
from tests.fit import causal_lm
from tests.fit.models import Tiny, loader, quiet_trainer
from tests.fit.slurm import slurm_job
from tests.mortal import run_mortals

EPOCH = 8  # batches
TIMEOUT = timedelta(seconds=20)


class Normed(Tiny):
    """With buffers, which the ranks average when they validate and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Voter(Normed):
    def configure_optimizers(self) -> Any:
        return DistributedLion(self.parameters(), lr=1e-3)


class TextVoter(causal_lm.CausalLM):
    def configure_optimizers(self) -> Any:
        return DistributedLion(self.parameters(), lr=1e-3)


class ActIn(pl.Callback):
    """On some ranks something happens in a hook, from a step on."""

    def __init__(self, hook: str, step: int, ranks: tuple[int, ...], what: str = "stop") -> None:
        def act(trainer: pl.Trainer, *_: Any, **__: Any) -> None:
            if trainer.global_step < step or trainer.global_rank not in ranks:
                return
            if what == "requeue":  # Lightning registers its handler in a SLURM job only
                trainer._signal_connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)
            elif what == "term":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                trainer.should_stop = True

        setattr(self, hook, act)


class Validations(pl.Callback):
    count = 0

    def on_validation_end(self, *_: Any) -> None:
        self.count += 1


def make(kind: str, size: int, inside: str) -> tuple[Any, Any]:
    text = inside == "domino"
    if kind == "domino":
        return DominoTPStrategy(size, "batch", timeout=TIMEOUT), causal_lm.CausalLM()
    if kind == "lion":
        strategy: Any = DistributedLionStrategy(node_size=size, inside=inside, timeout=TIMEOUT)
        return strategy, TextVoter() if text else Voter()
    # a fragment leaves after 4 steps, the other one after 6, and so on; it lands a step later
    settings: dict[str, Any] = {"sync_every": 4, "num_fragments": 2, "wire_dtype": "fp32"}
    strategy = StreamingDiLoCoStrategy(
        **settings, replica_size=size, inside=inside, timeout=TIMEOUT
    )
    module: Any = causal_lm.CausalLM() if text else Tiny() if inside == "fsdp" else Normed()
    return strategy, module


# strategy, ranks of a replica, what holds it, what happens, what else the Trainer gets
Case = tuple[str, int, str, tuple[Any, ...], dict[str, Any]]


def fit(folder: Path, world: int, case: Case) -> dict[str, Any]:
    kind, size, inside, act, on = case
    strategy, module = make(kind, size, inside)
    validations = Validations()
    trainer = quiet_trainer(
        strategy=strategy,
        devices=world,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        default_root_dir=folder / "root",
        callbacks=[validations, ActIn(*act), ModelCheckpoint(folder, "{step}")],
        **{"max_epochs": 3, **on},
    )
    rows = EPOCH * 2 * world // (size if inside == "domino" else 1)
    make_loader = causal_lm.loader if inside == "domino" else loader
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, make_loader(rows, 2), make_loader(2 * world, 2))
        except (RuntimeError, SIGTERMException) as raised:
            error = f"{type(raised).__name__}: {raised}"
    state = module.state_dict() if inside != "fsdp" else {}
    floats = [t.detach().flatten() for t in state.values() if t.is_floating_point()]
    return {
        "error": error,
        "step": trainer.global_step,
        "said": [str(w.message) for w in caught if "requested a stop" in str(w.message)],
        "weights": torch.cat([torch.zeros(1), *floats]),
        "validations": validations.count,
        "files": sorted(p.name for p in folder.iterdir()) if folder.exists() else [],
    }


BATCH, VALIDATED, EPOCH_END = "on_train_batch_end", "on_validation_end", "on_train_epoch_end"
ONE, ALL = (1,), (0, 1, 2)
# after which step all stop, and who is said to have wanted it; None: nobody
THREE: dict[str, tuple[Case, int, str | None]] = {
    "diloco, batch": (("diloco", 1, "ddp", (BATCH, 2, ONE), {}), 5, "Rank 1 requested a stop"),
    "diloco, all": (("diloco", 1, "ddp", (BATCH, 2, ALL), {}), 5, None),
    "diloco, validated": (
        ("diloco", 1, "ddp", (VALIDATED, 3, (0, 2)), {"val_check_interval": 3}),
        3,
        "Ranks 0, 2 requested a stop",
    ),
    "diloco, epoch": (
        ("diloco", 1, "ddp", (EPOCH_END, EPOCH, ONE), {}),
        EPOCH,
        "Rank 1 requested a stop",
    ),
    "diloco, epoch begins": (
        ("diloco", 1, "ddp", ("on_train_epoch_start", EPOCH, ONE), {}),
        EPOCH + 3,  # a fragment leaves after 10 steps
        "Rank 1 requested a stop",
    ),
    "diloco, min_steps": (("diloco", 1, "ddp", (BATCH, 2, ONE), {"min_steps": 9}), 11, "Rank 1"),
    "lion, batch": (("lion", 1, "ddp", (BATCH, 2, ONE), {}), 3, "Rank 1 requested a stop"),
    "lion, in a batch": (("lion", 1, "ddp", ("on_before_zero_grad", 2, ONE), {}), 4, "Rank 1"),
    "lion, all": (("lion", 1, "ddp", (BATCH, 2, ALL), {}), 3, None),
    "lion, validated": (
        ("lion", 1, "ddp", (VALIDATED, EPOCH, ONE), {}),
        EPOCH,
        "Rank 1 requested a stop",
    ),
    "lion, min_epochs": (
        ("lion", 1, "ddp", (BATCH, 2, ONE), {"min_epochs": 2}),
        2 * EPOCH,
        "Rank 1 requested a stop",
    ),
}
FOUR: dict[str, tuple[Case, int, str | None]] = {
    "domino, batch": (("domino", 2, "domino", (BATCH, 2, ONE), {}), 3, "Rank 1 requested a stop"),
    "domino, all": (("domino", 2, "domino", (BATCH, 2, (0, 1, 2, 3)), {}), 3, None),
    "domino, validated": (
        ("domino", 4, "domino", (VALIDATED, 2, (3,)), {"val_check_interval": 2}),
        2,
        "Rank 3 requested a stop",
    ),
    "domino, epoch": (("domino", 2, "domino", (EPOCH_END, EPOCH, (2,)), {}), EPOCH, "Rank 2"),
    "diloco, ddp": (("diloco", 2, "ddp", (BATCH, 2, (3,)), {}), 5, "Rank 3 requested a stop"),
    "diloco, fsdp": (("diloco", 2, "fsdp", (BATCH, 2, (3,)), {}), 5, "Rank 3 requested a stop"),
    "lion, ddp": (("lion", 2, "ddp", (BATCH, 2, (2,)), {}), 3, "Rank 2 requested a stop"),
    "lion, domino": (("lion", 2, "domino", (BATCH, 2, (2,)), {}), 3, "Rank 2 requested a stop"),
}
START = "on_train_batch_start"
TERMS: dict[str, tuple[Case, int]] = {
    "domino": (("domino", 2, "domino", (START, 2, (3,), "term"), {}), 3),
    "domino, accumulating": (
        ("domino", 2, "domino", (START, 2, (3,), "term"), {"accumulate_grad_batches": 2}),
        3,
    ),
    "domino, requeue": (("domino", 2, "domino", (START, 2, (3,), "requeue"), {}), 3),
    "lion, fsdp": (("lion", 2, "fsdp", (START, 2, (3,), "term"), {}), 3),
    "diloco, domino": (("diloco", 2, "domino", (START, 2, (3,), "term"), {}), 5),
    "in a validation": (
        ("diloco", 2, "ddp", ("on_validation_start", 3, (3,), "term"), {"val_check_interval": 3}),
        5,  # where the next fragment lands
    ),
    "at an epoch's end": (("lion", 2, "ddp", (EPOCH_END, EPOCH, (3,), "term"), {}), EPOCH + 1),
}


def play(rank: int, world: int, folder: Path) -> dict[str, Any]:
    cases = {name: case[0] for name, case in (THREE if world == 3 else FOUR).items()}
    if world == 4:
        cases |= {f"SIGTERM {name}": case for name, (case, _) in TERMS.items()}
    with slurm_job(folder / "slurm", rank):
        return {name: fit(folder / name, world, case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for world in (3, 4):
        folder = tmp_path_factory.mktemp("stopping")
        ends = run_mortals(play, world, folder, folder / "saved", timeout=TIMEOUT, limit_s=150.0)
        assert not any(end.error for end in ends), [end.error for end in ends]
        assert all(end.result is not None for end in ends), [end.exit_code for end in ends]
        found |= {name: [end.result[name] for end in ends] for name in ends[0].result}
    return found


@pytest.mark.parametrize("name", [*THREE, *FOUR])
def test_all_ranks_stop_after_the_same_step(played: Any, name: str) -> None:
    _, step, said = {**THREE, **FOUR}[name]
    first = played[name][0]
    for rank in played[name]:
        assert rank["error"] == ""
        assert rank["step"] == step
        assert rank["validations"] == first["validations"] > 0
        assert torch.equal(rank["weights"], first["weights"])
        assert f"step={step}.ckpt" in rank["files"]
    if said is None:
        assert first["said"] == []
    else:
        (text,) = first["said"]
        assert text.startswith(said)
        assert f"All ranks are stopping after step {step} with the same weights" in text


@pytest.mark.parametrize("name", TERMS)
def test_sigterm_on_one_rank_stops_all_after_the_same_step(played: Any, name: str) -> None:
    for rank in played[f"SIGTERM {name}"]:
        assert rank["error"].startswith("SIGTERMException")
        assert rank["step"] == TERMS[name][1]
