"""Every example runs unchanged; all but the notebook and the two machines share two ranks."""

from __future__ import annotations

import math
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import lightning
import nbformat
import pytest
from lightning.pytorch import Callback
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.lab import why_unavailable
from lightning_commfree.comm.digest import digest
from tests.forks import ForkedLab, run_typed
from tests.pages import commands_of, on_machines
from tests.world import run_ranks

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
MACHINES = "two_machines"
OWN_TESTS = {MACHINES, "plain_pytorch"}
SCRIPTS = sorted({path.stem for path in EXAMPLES.glob("*.py")} - OWN_TESTS)
STEPS = 30
CLI = ["fit", f"--config={EXAMPLES / 'lightning_cli.yaml'}", f"--trainer.max_steps={STEPS}"]
QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
CLI += [f"--trainer.{name}=false" for name in QUIET]


class Losses(Callback):
    """Record the loss of every step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(outputs["loss"].item())


def play(rank: int, size: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Run each script as this rank would, for `STEPS` steps."""
    base, made = folder / "base", lightning.Trainer
    arguments = {"lightning_cli": CLI, "lora": [str(base)]}
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for script in SCRIPTS:
            losses = Losses()
            small = {**QUIET, "max_steps": STEPS, "callbacks": [losses]}
            patch.setattr(lightning, "Trainer", lambda s=small, **given: made(**{**given, **s}))
            path = str(EXAMPLES / f"{script}.py")
            patch.setattr(sys, "argv", [path, *arguments.get(script, [])])
            trainer = runpy.run_path(path, run_name="__main__")["trainer"]
            found[script] = {
                "steps": trainer.global_step,
                "losses": losses.seen or [trainer.callback_metrics["train/loss"].item()],
                "end": [int(digest(p)) for p in trainer.lightning_module.parameters()],
                "strategy": type(trainer.strategy).__name__,
                "sent": trainer.strategy.ledger.bytes_by_phase["steps"],
            }
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("examples")
    config = GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(folder / "base")
    return run_ranks(play, 2, folder, folder), folder


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_trains_and_all_ranks_end_with_equal_weights(script: str, ranks: Any) -> None:
    (one, other), _ = ranks
    one, other = one[script], other[script]
    assert one["steps"] == other["steps"] == STEPS
    assert all(map(math.isfinite, one["losses"]))
    assert one["end"] == other["end"]
    assert sum(one["sent"].values()) > 0


@pytest.mark.parametrize("script", ["image_classifier", "text_model", "lora", "outer_optimizer"])
def test_the_loss_falls(script: str, ranks: Any) -> None:
    (one, _), _ = ranks
    losses = one[script]["losses"]
    assert len(losses) == STEPS
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])


def test_only_the_adapter_is_saved(ranks: Any) -> None:
    saved = ranks[1] / "outputs" / "lora"
    assert {path.name for path in saved.iterdir()} >= {"adapter_config.json"}
    assert not (saved / "model.safetensors").exists()


NEEDED = why_unavailable()


OWN_MODULE = commands_of((ROOT / "docs/own_module.md").read_text("utf-8"))


@pytest.mark.skipif(NEEDED is not None, reason=str(NEEDED))
@pytest.mark.parametrize("option", ["NODE_RANK=", "--node-rank "], ids=["plain", "torchrun"])
def test_two_machines_find_each_other_by_the_documented_commands(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the hosts file that Debian installs, and without naming an interface."""
    monkeypatch.chdir(ROOT)
    on_first, on_second = (command for command in OWN_MODULE if option in command)
    with ForkedLab(nodes=2, rate="100mbit", fresh=True) as lab:
        commands = [[run_typed, one] for one in on_machines(on_first, lab.address(0))]
        told = on_second.partition("  #")[0].replace("10.0.0.1", lab.address(0))
        assert commands[1][-1].endswith(told), "the page's command for the second machine"
        machines = lab.run(commands, timeout_s=100, env={"PYTHONPATH": str(ROOT)})
    said = [machine.output for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    weights = [re.search(r"rank \d: (256 steps, weights .*)", text) for text in said]
    assert all(weights), said
    assert weights[0][1] == weights[1][1]
    fp32_gradients = 256 * 4 * 4609  # the least that a node would send under DDP
    assert all(0 < machine.sent_bytes < fp32_gradients / 4 for machine in machines)


def executed(notebook: Any, folder: Path) -> list[str]:
    """Run all cells in a kernel, as a reader does, and return their output."""
    kernel = NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(folder)}})
    kernel.execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return ["".join(o.get("text", "") for o in cell.outputs) for cell in cells]


def test_the_notebook_runs_in_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    last = executed(notebook, tmp_path)[-1]
    found = re.search(r"loss (\S+) before, (\S+) after", last)
    assert found is not None, last
    assert float(found[2]) < 0.5 * float(found[1])

    kept = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    shown = str([cell.outputs for cell in kept.cells if cell.cell_type == "code"])
    assert re.search(r"loss \S+ before, \S+ after", shown), "stored as it was run"
    assert "Trained 256 steps" in shown
    assert "Warning" not in shown

    wrong = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        executed(wrong, tmp_path)
