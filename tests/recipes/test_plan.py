"""`recipes.plan`: the figures it prints are the planner's, for the model that would be trained."""

from __future__ import annotations

import copy
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.singleton import Singleton
from omegaconf import OmegaConf
from rich.console import Console

from commfree_planner import Model
from lightning_commfree.diloco import split_into_fragments
from recipes import planning as recipe
from recipes.plan import main
from recipes.training.language_model import LanguageModel

ROOT = Path(__file__).parents[2]
TINY = ("model=gpt2_tiny", "vocab_size=1024", "data.block_size=64", "step_time=0.02")
PNG = b"\x89PNG\r\n\x1a\n"


def composed(*overrides: str) -> Any:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("plan", [f"run_dir={ROOT}", *overrides])


def planned(folder: Path, *overrides: str, width: int = 200) -> str:
    config = OmegaConf.to_container(composed(*TINY, f"run_dir={folder}", *overrides), resolve=True)
    text = io.StringIO()
    recipe.plan(config, Console(file=text, width=width))
    return text.getvalue()


def test_in_80_columns_it_is_as_it_is_kept(tmp_path: Path) -> None:
    more = ("bandwidth=0.01", "latency=0.001", "tokens_per_step=4096")
    text = planned(tmp_path, *more, width=80).replace(str(tmp_path), "FOLDER")
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert text == (ROOT / "tests/recipes/golden/plan.txt").read_text()


def test_the_advice_keeps_what_the_configuration_fixes(tmp_path: Path) -> None:
    text = planned(tmp_path, "bandwidth=0.01", "sync_every=20", "overlap_steps=10")
    assert "Use strategy=streaming_diloco (sync_every=20, num_fragments=2, overlap_steps=10" in text
    assert "with your sync_every and overlap_steps: sync_every=20 num_fragments=2" in text


def model_of(name: str, *overrides: str) -> Model:
    config = composed(f"model={name}", *overrides, "step_time=1", "bandwidth=1")
    config = OmegaConf.to_container(config, resolve=True)
    return recipe.model_from_config(config["model"], config["vocab_size"])


def test_a_replica_needs_fsdp_from_some_size_on() -> None:
    """21 bytes a parameter: 16 of weights, gradients and AdamW, an eighth of 8 outer ones, 4 of
    DDP's buckets. In parts an eighth of 24, and 8 of the largest unit: what stands in no block."""
    model = Model((100_000_000,) * 10, 200_000_000, 1024)
    line = recipe.memory_line(model, 8)
    assert "25.2 GB with `inside=ddp` and replica_size=8" in line, 1.2 * 21
    assert "5.2 GB with `inside=fsdp`" in line, 1.2 * 24 / 8 + 0.2 * 8
    assert "1.1, 1.9, 3.8 billion parameters" in line, "24, 40 and 80 GB by 21 bytes"
    line = recipe.memory_line(model, 8, "int2")
    assert "25.8 GB with `inside=ddp`" in line, "1.2 * 21.5: an eighth of 4 more"
    assert "5.8 GB with `inside=fsdp`" in line, "1.2 * 28 / 8 + 0.2 * 8"


@pytest.mark.parametrize("name", ["gpt2_tiny", "llama_tiny"])
def test_fragments_are_those_that_pretraining_would_exchange(name) -> None:
    config = composed(f"model={name}", "vocab_size=256", "data.block_size=16")
    model_config = recipe.instantiate(
        OmegaConf.to_container(config, resolve=True)["model"], vocab_size=256, _convert_="all"
    )
    module = LanguageModel(model_config.to_dict())
    sizes = {n: p.numel() for n, p in module.named_parameters()}
    model = model_of(name, "vocab_size=256", "data.block_size=16")
    ours = model.fragments(model.default_num_fragments)
    assert [sum(map(model.layer_params, layers)) for layers in ours] == [
        sum(sizes[n] for n in fragment.parameters)
        for fragment in split_into_fragments(module, None, "strided")
    ]


def test_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none"]
    words = [*TINY, *quiet, "bandwidth=0.1", f"hydra.run.dir={tmp_path}/run"]
    monkeypatch.setattr(sys, "argv", ["plan", *words])
    before = copy.deepcopy(Singleton.get_state())
    try:
        main()
    finally:
        Singleton.set_state(before)
    text = " ".join(capsys.readouterr().out.split())
    assert 'Use strategy=streaming_diloco (sync_every="auto")' in text
    assert "a fixed sync_every, for runs that are equal bit for bit: sync_every=10" in text
    assert (tmp_path / "run" / recipe.FIGURE).read_bytes().startswith(PNG)


# Bad input


def test_a_model_without_blocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Flat(torch.nn.Module):
        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__()
            self.model = torch.nn.Linear(2, 2)

    monkeypatch.setattr(recipe, "LanguageModel", Flat)
    with pytest.raises(ValueError, match="Linear has no list of 3 blocks"):
        model_of("gpt2_tiny")
