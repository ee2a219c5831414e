"""The real strategy, in a real Trainer on real gloo ranks, against a plain Trainer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import AutoModelForCausalLM

from lightning_commfree import DominoTPStrategy
from lightning_commfree.host import DDPStrategy, ModelCheckpoint
from tests.fit.causal_lm import CausalLM, loader, words
from tests.fit.models import assert_same, quiet_trainer
from tests.world import run_ranks

STEPS = 10
BATCH = 4
TOLERANCE = 2e-5  # of a weight: sums run in another order, and fp32 rounds them


def trainer_for(strategy: Any, size: int, **kwargs: Any) -> Any:
    return quiet_trainer(
        strategy=strategy, devices=size, max_steps=STEPS, num_sanity_val_steps=0, **kwargs
    )


def fit(rank: int, size: int, kind: str, folder: Path, **kwargs: Any) -> dict[str, Any]:
    tensor_parallel = kwargs.pop("tensor_parallel_size", None)
    accumulate = kwargs.get("accumulate_grad_batches", 1)
    settings = kwargs.pop("settings", {})
    strategy = DominoTPStrategy(tensor_parallel, **settings)
    save = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=5)
    trainer = trainer_for(strategy, size, enable_checkpointing=True, callbacks=[save], **kwargs)
    module = CausalLM(kind)
    copies = size // (tensor_parallel or size)
    place = rank // (tensor_parallel or size)
    trainer.fit(module, ordered(STEPS * BATCH * accumulate, copies, place), loader(8, 4))
    return {
        "weights": {name: t.clone() for name, t in module.state_dict().items()},
        "loss": float(trainer.callback_metrics["val_loss"]),
        "waited": strategy.ledger.seconds_waited,
        "classes": sorted({type(m).__module__.split(".")[0] for m in module.modules()}),
    }


def ordered(rows: int, copies: int = 1, place: int = 0) -> DataLoader[Any]:
    """Return a loader that is not shuffled: Lightning's own sampler would be."""
    sampler = DistributedSampler(words(rows), copies, place, shuffle=False)
    return DataLoader(words(rows), batch_size=BATCH // copies, sampler=sampler)


CLIPPED = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}
CASES: dict[int, dict[str, Any]] = {  # by ranks: kind and what else `fit` takes
    2: {
        "gpt2": ("gpt2", {}),
        "llama": ("llama", {}),
        "clipped": ("gpt2", CLIPPED),
        "tokens": ("llama", {"settings": {"split": "token"}}),
    },
    4: {
        "llama": ("llama", {}),  # two key heads, so that two ranks hold each
        "two by two, clipped": ("gpt2", {"tensor_parallel_size": 2, **CLIPPED}),
    },
}


def many(rank: int, size: int, folder: Path) -> dict[str, Any]:
    return {
        case: fit(rank, size, kind, folder / f"{case} {size}", **kwargs)
        for case, (kind, kwargs) in CASES[size].items()
    }


def plain(kind: str, **kwargs: Any) -> dict[str, Any]:
    module = CausalLM(kind)
    trainer = trainer_for("auto", 1, **kwargs)
    rows = STEPS * BATCH * kwargs.get("accumulate_grad_batches", 1)
    trainer.fit(module, loader(rows, BATCH), loader(8, 4))
    return {
        "weights": {name: t.clone() for name, t in module.state_dict().items()},
        "loss": float(trainer.callback_metrics["val_loss"]),
    }


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    clipped = plain("gpt2", gradient_clip_val=0.3, accumulate_grad_batches=2)
    return {
        "gpt2": plain("gpt2"),
        "llama": (llama := plain("llama")),
        "tokens": llama,
        "clipped": clipped,
        "two by two, clipped": clipped,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("domino")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> dict[int, list[dict[str, Any]]]:
    return {size: run_ranks(many, size, folder, folder) for size in CASES}


def apart(weights: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    assert weights.keys() == others.keys()
    return max(float((t - others[name]).abs().max()) for name, t in weights.items())


@pytest.mark.parametrize(("size", "case"), [(size, case) for size in CASES for case in CASES[size]])
def test_ten_steps_equal_a_plain_trainer(
    ranks: dict[int, Any], references: dict[str, Any], size: int, case: str
) -> None:
    for outcomes in ranks[size]:
        assert apart(outcomes[case]["weights"], references[case]["weights"]) < TOLERANCE
        assert outcomes[case]["loss"] == pytest.approx(references[case]["loss"], abs=1e-3)
        assert outcomes[case]["classes"] == ["tests", "torch", "transformers"], "restored"
    unclipped = apart(references["gpt2"]["weights"], references["clipped"]["weights"])
    assert unclipped > 50 * TOLERANCE, "a missing clip would be seen"


def test_by_default_the_ranks_of_a_node_share_a_model_and_nodes_share_the_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DDPStrategy, "set_world_ranks", lambda _: None)
    strategy = DominoTPStrategy()
    strategy.parallel_devices = [torch.device("cpu")] * 2
    # rank 3 of 4; Lightning's own environments would tell the whole process so
    strategy.cluster_environment = SimpleNamespace(world_size=lambda: 4, global_rank=lambda: 3)
    strategy.set_world_ranks()  # as the Trainer does once it has set the devices
    assert strategy.tensor_parallel_size == 2
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 1}


def resume(rank: int, size: int, checkpoint: Path, kind: str) -> Any:
    module = CausalLM(kind)
    trainer = trainer_for(DominoTPStrategy(), size)
    trainer.fit(module, ordered(STEPS * BATCH), ckpt_path=checkpoint)
    return {name: t.clone() for name, t in module.state_dict().items()}


@pytest.mark.parametrize(("kind", "size"), [("gpt2", 2), ("llama", 4)])
def test_a_checkpoint_is_whole_and_loads_at_any_size(
    ranks: dict[int, Any], folder: Path, tmp_path: Path, kind: str, size: int
) -> None:
    final = ranks[2][0][kind]["weights"]
    checkpoints = folder / f"{kind} 2"
    saved = torch.load(checkpoints / f"step={STEPS}.ckpt", weights_only=True)
    assert_same(saved["state_dict"], final)
    module = CausalLM(kind)
    shapes = [tuple(p.shape) for p in module.parameters()]
    state = saved["optimizer_states"][0]["state"]
    assert [tuple(s["exp_avg"].shape) for s in state.values()] == shapes
    module.load_state_dict(saved["state_dict"])
    module.wrapped["lm"].save_pretrained(tmp_path / "export")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    batch = words(3).tensors[0]
    assert torch.equal(exported(batch).logits, module.wrapped["lm"](batch).logits)
    # a plain Trainer continues from step 5, with the first batch that it gets
    module = CausalLM(kind)
    checkpoint = checkpoints / "step=5.ckpt"
    later = TensorDataset(words(STEPS * BATCH).tensors[0].roll(-5 * BATCH, 0))
    trainer_for("auto", 1).fit(module, DataLoader(later, batch_size=BATCH), ckpt_path=checkpoint)
    assert apart(dict(module.state_dict()), final) < TOLERANCE
    first, *others = run_ranks(resume, size, tmp_path, checkpoint, kind)
    assert apart(first, final) == 0 if size == 2 else apart(first, final) < TOLERANCE
    assert all(apart(weights, first) == 0 for weights in others)
