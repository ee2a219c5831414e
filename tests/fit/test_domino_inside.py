"""Replicas that are tensor groups: Domino inside, Streaming DiLoCo or votes between."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_commfree import DistributedLion, DistributedLionStrategy, StreamingDiLoCoStrategy
from lightning_commfree.domino import DominoSettings
from lightning_commfree.model.shards import is_shard
from tests.fit.causal_lm import CausalLM, words
from tests.fit.models import SavesAfterBatches, assert_same, quiet_trainer
from tests.world import run_ranks

STEPS, SAVED, BATCH = 9, 6, 2
HALF = 5  # batches after which an accumulated step is half done


class Lm(CausalLM):
    def __init__(self, kind: str, lion: bool) -> None:
        super().__init__(kind, dropout=0.1 if lion else 0.0)
        self.lion = lion

    def configure_optimizers(self) -> Any:
        if self.lion:
            return DistributedLion(self.parameters(), lr=1e-3, weight_decay=0.1)
        return super().configure_optimizers()


class Look(pl.Callback):
    """Keeps what a rank holds after every step: its parts apart from what all ranks hold."""

    def __init__(self) -> None:
        self.copies: list[dict[str, Tensor]] = []
        self.parts: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        named = [(name, p, is_shard(p)) for name, p in module.named_parameters()]
        self.copies.append({name: p.detach().clone() for name, p, part in named if not part})
        self.parts.append({name: p.detach().clone() for name, p, part in named if part})


def data(ranks: int, *mine: int) -> Any:
    """Batches whose rows are those of the ranks `mine`, behind each other."""
    rows = torch.arange(STEPS * BATCH * ranks).view(STEPS, ranks, BATCH)[:, list(mine)]
    subset = torch.utils.data.Subset(words(STEPS * BATCH * ranks), rows.flatten().tolist())
    return torch.utils.data.DataLoader(subset, batch_size=BATCH * len(mine))


def fit(rank: int, size: int, kind: str, inside: Any, folder: Path | None, **changes: Any) -> Any:
    lion, path = changes.pop("lion", False), changes.pop("ckpt_path", None)
    options, also = changes.pop("trainer", {}), changes.pop("also", [])
    outer: dict[str, Any] = {
        "sync_every": 4,
        "num_fragments": 2,
        "wire_dtype": "fp32",
        "replica_size": 2,
    }
    strategy: Any = (
        DistributedLionStrategy(node_size=2, inside=inside, **changes)
        if lion
        else StreamingDiLoCoStrategy(inside=inside, **{**outer, **changes})
    )
    look = Look()
    callbacks: list[pl.Callback] = [look, *also]
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=3))
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        max_epochs=1,
        callbacks=callbacks,
        enable_checkpointing=folder is not None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        **options,
    )
    torch.manual_seed(5)
    module = Lm(kind, lion)
    first = rank // 2 * 2
    batches = data(size, first, first + 1) if inside != "ddp" else data(size, rank)
    valid = torch.utils.data.DataLoader(words(8), batch_size=2)
    trainer.fit(module, batches, valid, ckpt_path=path)
    return {
        "copies": look.copies,
        "parts": look.parts,
        "final": {name: p.detach().clone() for name, p in module.named_parameters()},
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "bytes": strategy.ledger.bytes_by_tag["outer_gradient"],
    }


def every(rank: int, size: int, folder: Path) -> Any:
    played: Any = {}
    for kind in ("gpt2", "llama"):
        for inside in ("ddp", "domino"):
            place = folder / f"{kind}-{inside}"
            played[kind, inside] = fit(rank, size, kind, inside, place)
    path = folder / "llama-domino" / f"step={SAVED}.ckpt"
    played["resumed"] = fit(rank, size, "llama", "domino", None, ckpt_path=path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        other = fit(rank, size, "llama", "ddp", None, ckpt_path=path)
    played["other"] = {**other, "said": " ".join(str(one.message) for one in said)}
    played["fp4"] = fit(rank, size, "gpt2", "domino", None, wire_dtype="fp4")
    clipped = {"trainer": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}}
    for inside in ("ddp", "domino"):
        played["clipped", inside] = fit(rank, size, "llama", inside, None, **clipped)
    accumulated: Any = {"trainer": {"accumulate_grad_batches": 2}}
    half = SavesAfterBatches(folder, HALF)
    played["half"] = fit(rank, size, "llama", "domino", None, also=[half], **accumulated)
    path = folder / f"{HALF}.ckpt"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        again = fit(rank, size, "llama", "domino", None, ckpt_path=path, **accumulated)
    played["half resumed"] = {**again, "said": " ".join(str(one.message) for one in said)}
    lion: dict[str, Any] = {"inside": DominoSettings(split="token"), "lion": True}
    place = folder / "gpt2-lion"
    played["gpt2", "lion"] = fit(rank, size, "gpt2", folder=place, **lion)
    path = place / f"step={SAVED}.ckpt"
    played["lion resumed"] = fit(rank, size, "gpt2", folder=None, ckpt_path=path, **lion)
    try:
        fit(rank, size, "llama", "domino", None, replica_size=4)
    except ValueError as error:
        played["heads"] = str(error)
    return played


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("saved")
    return run_ranks(every, 4, tmp_path_factory.mktemp("four"), folder), folder


def close(got: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_tensor_group_is_a_replica(played: Any, kind: str) -> None:
    """To rounding: sums over ranks are added in another order than in a whole layer."""
    for rank in played[0]:
        ours, ddp = rank[kind, "domino"], rank[kind, "ddp"]
        assert len(ours["parts"]) == STEPS
        assert ours["parts"][0], "the model is divided"
        close(ours["final"], ddp["final"], 2e-5)
        assert ours["val_loss"] == pytest.approx(ddp["val_loss"], rel=1e-5)
    one, other = (played[0][r][kind, "domino"]["copies"][2] for r in (0, 2))
    assert max((one[n] - other[n]).abs().max() for n in one) > 1e-3, "replicas train apart"


@pytest.mark.parametrize("key", [("gpt2", "domino"), "fp4", ("gpt2", "lion")])
def test_replicated_parameters_of_a_group_stay_equal(played: Any, key: Any) -> None:
    """Each of them exchanges a slice of it: no rank decodes it by its own blocks."""
    for first, second in ((0, 1), (2, 3)):
        pair = [played[0][rank][key]["copies"] for rank in (first, second)]
        assert len(pair[0]) == STEPS
        for step, (one, other) in enumerate(zip(*pair, strict=True)):
            assert one
            assert all(torch.equal(one[name], other[name]) for name in one), step
    final = [rank[key]["final"] for rank in played[0]]
    assert all(torch.equal(final[0][n], other[n]) for other in final[1:] for n in final[0])


@pytest.mark.parametrize(
    ("key", "resumed"), [(("llama", "domino"), "resumed"), (("gpt2", "lion"), "lion resumed")]
)
def test_a_resume_is_exact(played: Any, key: Any, resumed: str) -> None:
    """Under Lion with dropout: each rank's own random numbers continue too."""
    for rank in played[0]:
        for held in ("copies", "parts"):
            straight, again = rank[key][held][SAVED:], rank[resumed][held]
            assert len(again) == STEPS - SAVED
            assert_same(again, straight)


def test_a_half_accumulated_step_resumes_exactly(played: Any) -> None:
    for rank in played[0]:
        for held in ("copies", "parts"):
            straight, again = rank["half"][held][HALF:], rank["half resumed"][held]
            assert len(again) == len(straight) == STEPS - HALF
            assert_same(again, straight)
        assert "partially accumulated" not in rank["half resumed"]["said"], "nothing is lost"


def test_gradients_are_clipped_by_the_norm_of_the_whole(played: Any) -> None:
    for rank in played[0]:
        close(rank["clipped", "domino"]["final"], rank["clipped", "ddp"]["final"], 2e-5)


def test_a_checkpoint_is_whole_and_resumes_in_another_layout(played: Any) -> None:
    ours, ddp = (
        torch.load(played[1] / f"llama-{inside}" / f"step={STEPS}.ckpt", weights_only=True)
        for inside in ("domino", "ddp")
    )
    close(ours["state_dict"], ddp["state_dict"], 2e-5)
    (got,), (expected,) = ours["optimizer_states"], ddp["optimizer_states"]
    for index, state in expected["state"].items():
        close(got["state"][index], state, 2e-5)
    CausalLM("llama").load_state_dict(ours["state_dict"])

    other = played[0][0]["other"]
    assert "inside was 'domino' and is 'ddp'" in other["said"]
    assert len(other["copies"]) == STEPS - SAVED


@pytest.mark.parametrize(("kind", "run"), [("llama", "domino"), ("gpt2", "lion")])
def test_a_plain_trainer_and_transformers_read_the_checkpoint(
    played: Any, kind: str, run: str, tmp_path: Path
) -> None:
    path = played[1] / f"{kind}-{run}" / f"step={STEPS}.ckpt"
    module, valid = Lm(kind, lion=run == "lion"), torch.utils.data.DataLoader(words(8), 2)
    (found,) = quiet_trainer(devices=1).validate(module, valid, str(path), verbose=False)
    for rank in played[0]:
        assert rank[kind, run]["val_loss"] == pytest.approx(found["val_loss"], rel=1e-5)

    model = module.wrapped["lm"]
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name


def test_replicas_send_about_as_much_as_with_ddp_inside(played: Any) -> None:
    per_rank = [(r["gpt2", "domino"]["bytes"], r["gpt2", "ddp"]["bytes"]) for r in played[0]]
    ours, ddp = (sum(one) for one in zip(*per_rank, strict=True))
    assert ddp <= ours <= 1.03 * ddp, "the vocabulary is padded"


def test_key_heads_that_several_ranks_hold_are_refused(played: Any) -> None:
    """Two of them on four ranks: a part would have two owners."""
    for rank in played[0]:
        assert "set `replica_size` to at most 2" in rank["heads"]


@pytest.mark.parametrize(
    ("strategy", "settings", "text"),
    [
        (StreamingDiLoCoStrategy, {}, "with `replica_size=1` a replica has only one"),
        (DistributedLionStrategy, {}, "with `node_size=1` a replica has only one"),
        (
            DistributedLionStrategy,
            {"node_size": 2, "ties": "random"},
            "does not work with `inside=",
        ),
    ],
)
def test_settings_that_contradict_inside_are_refused(
    strategy: Any, settings: Any, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        strategy(inside="domino", **settings)
