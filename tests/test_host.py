"""Which of Lightning's two packages is used, and the errors where a script mixes them."""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_commfree import host
from tests.forks import Fork

ROOT = Path(__file__).resolve().parents[1]


def run_script(script: str, folder: Path, first: Callable[[], None] | None = None) -> list[str]:
    """Run a script in a fork, after `first`, and return the lines that it printed."""
    (folder / "script.py").write_text(script)
    kept = {name: value for name, value in os.environ.items() if name != host.VARIABLE}
    with (folder / "output").open("w+") as output:
        environment = {**kept, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(folder / "script.py")]
        process = Fork(command, cwd=folder, env=environment, stdout=output, first=first)
        code, printed = process.end(280), (folder / "output").read_text()
    assert code == 0, printed[-3000:]
    return printed.splitlines()


def forget_lightning() -> None:
    """Forget our package and Lightning's, as if nothing had imported them yet."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("lightning", "lightning_commfree", "pytorch_lightning"):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("imported", "variable", "chosen"),
    [
        ([], None, "lightning"),
        (["lightning.pytorch"], None, "lightning"),
        (["pytorch_lightning"], None, "pytorch_lightning"),
        (["lightning.pytorch", "pytorch_lightning"], None, "lightning"),
        (["pytorch_lightning", "lightning.pytorch"], None, "pytorch_lightning"),
        (["lightning.pytorch"], "pytorch_lightning", "pytorch_lightning"),
        (["pytorch_lightning"], "lightning", "lightning"),
        (["pytorch_lightning"], "", "pytorch_lightning"),
    ],
)
def test_the_variable_decides_then_the_imported_package(
    imported: list[str], variable: str | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host.sys, "modules", dict.fromkeys(imported))
    monkeypatch.setattr(host, "find_spec", lambda name: object())
    assert host.choose({} if variable is None else {host.VARIABLE: variable}) == chosen


def test_pytorch_lightning_alone_is_used_if_it_alone_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host.sys, "modules", {})
    monkeypatch.setattr(host, "find_spec", lambda name: None)
    assert host.choose({}) == "pytorch_lightning"


def test_an_unknown_value_of_the_variable_is_refused() -> None:
    with pytest.raises(ValueError, match="'lightning' or 'pytorch_lightning', to match"):
        host.choose({host.VARIABLE: "pl"})


def test_both_packages_give_the_same_names() -> None:
    """The type checker sees one branch only."""
    (branch,) = [
        node for node in ast.parse(Path(host.__file__).read_text()).body if isinstance(node, ast.If)
    ]
    text = "\n".join(map(ast.unparse, branch.body))
    text = text.replace("lightning.pytorch", "pytorch_lightning")
    text = text.replace("lightning.fabric", "lightning_fabric")
    assert sorted(text.splitlines()) == sorted(map(ast.unparse, branch.orelse))


MIXED = """
import json
import lightning_commfree
import {package} as pl
from {package}.demos.boring_classes import BoringModel

for strategy in ("distributed_lion_fork", lightning_commfree.StreamingDiLoCoStrategy()):
    try:
        pl.Trainer(strategy=strategy, accelerator="cpu", logger=False)
    except (TypeError, ValueError) as error:
        print(json.dumps(str(error)))
try:
    lightning_commfree.host.pl.Trainer(
        strategy="streaming_diloco_fork", accelerator="cpu", max_steps=1, logger=False
    ).fit(BoringModel())
except TypeError as error:
    print(json.dumps(str(error)))
"""


def test_a_trainer_of_the_other_package_says_what_to_set(tmp_path: Path) -> None:
    """It is imported after ours, as sorted imports have it."""
    lines = run_script(MIXED.format(package="pytorch_lightning"), tmp_path)
    name, instance, module = (json.loads(line) for line in lines if line.startswith('"'))
    # Lightning's own words for a name that it does not know
    assert "invalid strategy name: `strategy='distributed_lion_fork'`" in name
    assert (
        "StreamingDiLoCoStrategy is for lightning.pytorch and does not work with a Trainer from"
        f" pytorch_lightning. Set the environment variable {host.VARIABLE}=pytorch_lightning before"
        " importing lightning_commfree."
    ) in instance
    assert "Please switch to a single import style" in module  # Lightning's own words


SPAWNED = """
if __name__ == "__main__":  # so a spawned rank imports nothing before it unpickles the launcher
    import os
    import pytorch_lightning as pl
    import lightning_commfree
    from pytorch_lightning.demos.boring_classes import BoringModel

    trainer = pl.Trainer(
        strategy="streaming_diloco_spawn", accelerator="cpu", max_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(BoringModel())
    print("trained", type(trainer.strategy).__mro__[2].__module__)
    print(os.environ.get("COMMFREE_HOST"))
"""


def test_spawned_ranks_use_the_package_of_the_process_that_spawns_them(tmp_path: Path) -> None:
    trained, variable = run_script(SPAWNED, tmp_path, forget_lightning)[-2:]
    assert trained == "trained pytorch_lightning.strategies.ddp"
    assert variable == "None"  # it is set for the launch only
