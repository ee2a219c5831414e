"""GPT-2 and Llama as they are, built on `meta`, in replicas whose ranks hold parts of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from transformers import GPT2LMHeadModel, LlamaForCausalLM

from lightning_commfree import DistributedLion, DistributedLionStrategy, StreamingDiLoCoStrategy
from lightning_commfree.layouts.fsdp import why_unavailable
from lightning_commfree.model.shards import local_tensor
from tests.fit.causal_lm import CausalLM, loader, make
from tests.fit.models import assert_same, quiet_trainer
from tests.fit.test_fsdp import Watch
from tests.world import run_ranks

WHY_NOT = why_unavailable()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

STEPS, SAVED, BATCH = 9, 6, 2
CELLS = [("gpt2", True), ("llama", False)]  # kind of model, with Lion
CLASSES: dict[str, Any] = {"gpt2": GPT2LMHeadModel, "llama": LlamaForCausalLM}


class OnMeta(CausalLM):
    """Its model has no values until a strategy divides it."""

    def __init__(self, kind: str, lion: bool) -> None:
        super().__init__(kind)
        self.config, self.lion = self.wrapped["lm"].config, lion
        self.wrapped = torch.nn.ModuleDict()

    def configure_model(self) -> None:
        if "lm" not in self.wrapped:
            with torch.device("meta"):
                self.wrapped["lm"] = CLASSES[self.config.model_type](self.config)

    def configure_optimizers(self) -> Any:
        if self.lion:
            return DistributedLion(self.parameters(), lr=1e-3, weight_decay=0.1)
        return super().configure_optimizers()


def refused_to_save(lm: Any) -> str:
    with pytest.raises(RuntimeError) as error:
        lm.save_pretrained("nowhere")
    return str(error.value)


def fit(kind: str, lion: bool, size: int, folder: Path, ckpt_path: Path | None = None) -> Any:
    outer: dict[str, Any] = {"sync_every": 4, "num_fragments": 2}
    strategy: Any = (
        DistributedLionStrategy(node_size=2, inside="fsdp")
        if lion
        else StreamingDiLoCoStrategy(replica_size=2, inside="fsdp", **outer)
    )
    watch = Watch()
    save = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=3)
    trainer = quiet_trainer(
        strategy=strategy,
        max_epochs=1,
        devices=size,
        callbacks=[watch, save],
        enable_checkpointing=True,
        num_sanity_val_steps=0,
    )
    torch.manual_seed(3)
    module = OnMeta(kind, lion)
    trainer.fit(module, loader(size * BATCH * STEPS, BATCH), loader(8, 2), ckpt_path=ckpt_path)
    lm: Any = module.wrapped["lm"]
    return {
        "local": watch.local,
        "tied": lm.get_input_embeddings().weight is lm.get_output_embeddings().weight,
        "validated": trainer.validate(module, loader(8, 2), verbose=False)[0]["val_loss"],
        "refused": refused_to_save(lm),
        "held": sum(local_tensor(p).numel() for p in module.parameters()),
    }


def every_cell(rank: int, size: int, folder: Path) -> Any:
    played = {}
    for kind, lion in CELLS:
        place = folder / f"{kind}-{lion}"
        straight = fit(kind, lion, size, place)
        resumed = fit(kind, lion, size, place / "again", place / f"step={SAVED}.ckpt")
        played[kind, lion] = straight, resumed
    return played


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("saved")
    return run_ranks(every_cell, 4, tmp_path_factory.mktemp("four"), folder), folder


def state_of(folder: Path, kind: str, lion: bool) -> dict[str, Tensor]:
    path = folder / f"{kind}-{lion}" / f"step={STEPS}.ckpt"
    state: dict[str, Tensor] = torch.load(path, weights_only=True)["state_dict"]
    return state


@pytest.mark.parametrize(("kind", "lion"), CELLS)
def test_a_model_on_meta_trains_and_resumes_exactly(played: Any, kind: str, lion: bool) -> None:
    numel = sum(p.numel() for p in make(kind).parameters())
    for rank in played[0]:
        straight, resumed = rank[kind, lion]
        assert len(straight["local"]) == STEPS
        assert len(resumed["local"]) == STEPS - SAVED
        assert_same(resumed["local"], straight["local"][SAVED:])
        assert all(tensor.isfinite().all() for tensor in resumed["local"][-1].values())
        assert straight["tied"] == (kind == "gpt2")
        assert "The model is still sharded after `fit`" in straight["refused"]
        assert "`trainer.save_checkpoint(path)` on all ranks" in straight["refused"]
        assert 0.4 * numel < straight["held"] < 0.6 * numel


@pytest.mark.parametrize(("kind", "lion"), CELLS)
def test_a_plain_trainer_and_transformers_read_the_checkpoint(
    played: Any, kind: str, lion: bool, tmp_path: Path
) -> None:
    state = state_of(played[1], kind, lion)
    module = CausalLM(kind)
    module.load_state_dict(state)
    trainer = quiet_trainer(devices=1)
    (found,) = trainer.validate(module, loader(8, 2), verbose=False)
    for rank in played[0]:
        assert rank[kind, lion][0]["validated"] == pytest.approx(found["val_loss"], rel=1e-6)

    module.wrapped["lm"].save_pretrained(tmp_path)
    loaded = CLASSES[kind].from_pretrained(tmp_path)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, state[f"wrapped.lm.{name}"]), name
