"""A module whose own `state_dict` leaves tensors out of checkpoints, renames or copies them: the
fit runs, and resumes exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_commfree import (
    DistributedLion,
    DistributedLionStrategy,
    DominoTPStrategy,
    StreamingDiLoCoStrategy,
)
from lightning_commfree.host import pl
from lightning_commfree.model.replication import persistent_buffers
from tests.fit import causal_lm
from tests.fit.models import (
    Noisy,
    Recorder,
    SavesAfterBatches,
    assert_same,
    info_messages,
    loader,
    quiet_trainer,
)
from tests.fit.saved import part_of, resume_warnings
from tests.world import run_ranks

STEPS, SAVED = 6, 3


class Encoded(Noisy):
    """A frozen part, whose BatchNorm counts all the same, before a trained one."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Any) -> Any:
        return super().forward(self.norm(self.encoder(x)))

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        if isinstance(self.trainer.strategy, DistributedLionStrategy):
            return DistributedLion(trained, lr=0.02)
        return torch.optim.AdamW(trained, lr=0.02)


class Plain(Encoded):
    """As in Lightning's documentation, without arguments."""

    def state_dict(self) -> Any:  # type: ignore[override]
        return {k: v for k, v in super().state_dict().items() if "encoder" not in k}


class Trainable(Encoded):
    """Copies of what is trained, and so no statistics of the trained part's BatchNorm."""

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return {k: p.detach().cpu().clone() for k, p in self.named_parameters() if p.requires_grad}


class Untrained(Encoded):
    """Leaves out a part that is trained."""

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return {k: v for k, v in super().state_dict().items() if not k.startswith("head")}


class Renamed(Encoded):
    def state_dict(self, *_: Any, **__: Any) -> Any:
        return {f"net.{k}": v for k, v in super().state_dict().items()}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        state = {k.removeprefix("net."): v for k, v in state.items()}
        return super().load_state_dict(state, *args, **kwargs)


class Hooked(Encoded):
    """A submodule drops its own keys."""

    def __init__(self) -> None:
        super().__init__()

        def drop(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
            for name in [name for name in state if name.startswith(prefix)]:
                del state[name]

        self.encoder[1].register_state_dict_post_hook(drop)


class Cleaned(Encoded):
    def on_save_checkpoint(self, checkpoint: Any) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {k: v for k, v in state.items() if "encoder" not in k}


def make(kind: str) -> Any:
    if kind == "lion":
        return DistributedLionStrategy()
    settings: dict[str, Any] = {"sync_every": 2, "num_fragments": 2}
    if kind != "diloco":
        settings |= {"replica_size": 2, "inside": kind}
    return StreamingDiLoCoStrategy(**settings)


def run(kind: str, module: pl.LightningModule, size: int, folder: Path, **ckpt: Any) -> Any:
    """Return the weights after every step and all tensors at the end, and whether it was exact."""
    recorder = Recorder()
    trainer = quiet_trainer(
        strategy=make(kind),
        devices=size,
        max_steps=STEPS,
        callbacks=[recorder, SavesAfterBatches(folder, SAVED)],
    )
    with resume_warnings() as said, info_messages() as info:
        trainer.fit(module, loader(40, 4), **ckpt)
    exact = not said and any(text.startswith(("Resumed", "Restored")) for text in info)
    tensors = dict(module.named_buffers())
    return list(recorder.local), tensors, exact


def straight_and_resumed(rank: int, size: int, folder: Path, kind: str, module: Any) -> Any:
    straight, tensors, _ = run(kind, module(), size, folder)
    resumed, others, exact = run(
        kind, module(), size, folder / "again", ckpt_path=folder / f"{SAVED}.ckpt"
    )
    return straight[SAVED:], resumed, tensors, others, exact


@pytest.mark.parametrize("kind", ["diloco", "lion"])
@pytest.mark.parametrize("module", [Plain, Trainable, Untrained, Renamed, Hooked, Cleaned])
def test_the_fit_resumes_exactly(tmp_path: Path, kind: str, module: Any) -> None:
    outcomes = run_ranks(straight_and_resumed, 2, tmp_path, tmp_path, kind, module)
    for straight, resumed, tensors, others, _ in outcomes:
        assert_same(resumed, straight)
        assert_same(others, tensors)
    assert outcomes[0][-1], "and says so, on rank 0"
    kept = part_of(tmp_path / f"{SAVED}.ckpt", 1)["tensors"]
    assert "encoder.0.weight" not in kept, "a frozen base model did not change"


def sharded(rank: int, size: int, folder: Path, module: Any) -> Any:
    trainer = quiet_trainer(strategy=make("fsdp"), devices=size, max_steps=STEPS)
    trainer.fit(module(), loader(40, 4))
    trainer.save_checkpoint(folder / "a.ckpt")


@pytest.mark.parametrize("module", [Plain, Trainable, Renamed])
def test_shards_are_gathered_whatever_their_names(tmp_path: Path, module: Any) -> None:
    run_ranks(sharded, 2, tmp_path, tmp_path, module)
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    whole = Encoded()
    for name, tensor in whole.state_dict().items():
        found = state.get(name, state.get(f"net.{name}"))
        assert (found is None) == ("encoder" in name and module is not Renamed) or "norm" in name
        assert found is None or found.shape == tensor.shape


class Copied(causal_lm.CausalLM):
    """Half-precision copies of the weights, some of them under another name."""

    def state_dict(self) -> Any:  # type: ignore[override]
        return {
            k: v.clone().half() if v.is_floating_point() else v
            for k, v in super().state_dict().items()
        }


def tensor_parallel(rank: int, size: int, folder: Path) -> Any:
    strategy = DominoTPStrategy(size, "batch")
    trainer = quiet_trainer(strategy=strategy, devices=size, max_steps=2)
    trainer.callbacks.append(SavesAfterBatches(folder, 2))
    trainer.fit(Copied(), causal_lm.loader(20, 2))


def test_domino_gathers_copies_of_its_shards(tmp_path: Path) -> None:
    run_ranks(tensor_parallel, 2, tmp_path, tmp_path)
    state = torch.load(tmp_path / "2.ckpt", weights_only=True)["state_dict"]
    for name, tensor in nn.Module.state_dict(causal_lm.CausalLM()).items():
        assert state[name].shape == tensor.shape, name
        assert state[name].dtype == (torch.float16 if tensor.is_floating_point() else tensor.dtype)


def test_persistent_buffers_are_those_of_a_plain_state() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(2)))
    module[1].register_buffer("table", torch.ones(2), persistent=False)
    module.add_module("again", module[0])
    module.register_buffer("none", None)
    state = module.state_dict()
    found = persistent_buffers(module, remove_duplicate=False)
    assert set(found) == {n for n, _ in module.named_buffers(remove_duplicate=False)} & set(state)
    assert "1.table" not in found
    assert set(persistent_buffers(module)) == set(found) - {n for n in found if "again" in n}
