"""Somebody who types what a page says: `Reader.type_in`, for `test_readme.py`.

A real bash reads a command, and what bash would start is done in this process, as far as a machine
without GPUs, root and hours can:

- A recipe runs from its command line to its last file. All that the command asks for is composed
  and checked as it stands, optimizer and Trainer are built; only then is the job made small
  (`shrunk`). Of a sweep all jobs are composed and the first one trains.
- The ranks that torchrun or SLURM would start must be the Trainer's; then one of them trains alone.
- A bench parses its arguments and measures nothing. Examples have tests of their own.
- Of `make TARGET`, what it would do is printed; recipes and benches in there are tried.

Not tried: submitit's own settings, an extra that the tests do without; W&B's server; targets of
make without a recipe; whether a model of the size that is asked for fits into memory.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.singleton import Singleton
from torch import nn
from torch.distributed.run import parse_args as parse_torchrun

from commfree_planner.command import main as commfree_plan
from recipes.comparison import running
from recipes.comparison.jobs import Job, Plan
from recipes.comparison.running import Record
from recipes.data.corpus import Shakespeare, Split, TextFiles
from recipes.data.training_data import TrainingData
from recipes.training import run as training
from recipes.training.report import SUMMARY_FILE
from tests.pages import read_by_bash

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
_HERE = {"accelerator": "cpu", "devices": 1, "num_nodes": 1}
_LAUNCHED = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "SLURM_NTASKS", "NODE_RANK")
STOPPED = "outputs/pretrain/stopped"  # a run of the reader's, and its copy
COPY = "copy_of_stopped"
STEPS, MORE_STEPS = 2, 3  # of a run, and of one that goes on
SILENT = ["hydra/job_logging=none", "hydra/hydra_logging=none"]  # "disabled" ends all loggers


class Ranks(NamedTuple):
    """The processes that torchrun or SLURM would start."""

    nodes: int
    per_node: int


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """Return a job's configuration with what decides where it runs and how long made small."""
    steps = MORE_STEPS if config["ckpt_path"] else STEPS
    small: dict[str, dict[str, Any]] = {
        "trainer": {
            **_HERE,
            **{"precision": "32-true", "max_steps": steps, "accumulate_grad_batches": 1},
            **{"val_check_interval": 1, "limit_val_batches": 1},
        },
        "optimizer": {"total_steps": steps, "warmup_steps": 1},
        "data": {"batch_size": 2, "num_workers": 0, "seed": 1},
        "strategy": {"replica_size": 1, "node_size": 1, "tensor_parallel_size": 1},
        "model": {
            **{"n_layer": 1, "n_head": 2, "n_embd": 16},
            **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1},
            **{"hidden_size": 16, "intermediate_size": 32, "head_dim": 8},
        },
        "report": {"sample_tokens": 1},
    }
    parts = {
        part: {key: values.get(key, value) for key, value in config[part].items()}
        for part, values in small.items()
    }
    return {**config, **parts, "compile": None, "seed": 1}


class Reader:
    """Types commands in the working directory, which has all that the pages speak of."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._ranks: Ranks | None = None
        self._done: dict[str, str] = {}  # small jobs, and the folders of their runs
        self._fit, self._documents = training.fit, TextFiles.documents
        patch.setattr(training, "fit", self._fit_in_small)
        patch.setattr(running, "_run_here", self._run_here)
        patch.setattr(running, "_run_in_laboratory", self._run_in_laboratory)
        patch.setattr(running, "why_unavailable", lambda: None)
        patch.setattr(Shakespeare, "documents", self._beginnings)
        patch.setenv("RUN", STOPPED)
        patch.setenv("SLURM_JOB_ID", "7")
        patch.setenv("WANDB_MODE", "disabled")  # where a command does not say how

    def type_in(self, script: str) -> None:
        """Do what bash would start; fail where a reader would see an error."""
        asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script, re.MULTILINE))
        started = list(read_by_bash(script))
        assert started, f"nothing is started by {script}"
        for program, *words in started:
            if asked:
                self._launch("SLURM", asked["nodes"], asked["ntasks-per-node"])
            if program == "make":
                self._make(words)
            elif program == "torchrun":
                options = parse_torchrun(words)
                self._launch("torchrun", options.nnodes, options.nproc_per_node)
                start = self._module if options.module else self._script
                start([options.training_script, *options.training_script_args])
            elif program == "commfree-plan":
                _call(partial(commfree_plan, words))
            else:
                assert Path(program).name == "python", f"{program} {words}"
                self._module(words[1:]) if words[0] == "-m" else self._script(words)

    def _make(self, words: Sequence[str]) -> None:
        # -o: as if .venv were there; only the commands of the target itself are of interest
        command = [
            "make",
            "--no-print-directory",
            "-n",
            "-o",
            ".venv/.set-up-done",
            "PY=python",
            *words,
        ]
        dry = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert dry.returncode == 0, dry.stderr
        if re.search(r"-m (recipes|benchmarks)\.", dry.stdout):
            self.type_in(dry.stdout)

    def _launch(self, by: str, nodes: str | int, per_node: str | int) -> None:
        """Make this process one of those that somebody else has started."""
        self._ranks = ranks = Ranks(int(nodes), int(per_node))
        world = str(ranks.nodes * ranks.per_node)
        os.environ.update(
            {
                "torchrun": {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": world},
                "SLURM": {"SLURM_JOB_NAME": "pretrain", "SLURM_NTASKS": world},
                "laboratory": {"NODE_RANK": "0"},
            }[by]
        )

    def _script(self, words: Sequence[str]) -> None:
        """See that a script is there, and is one of the examples, which tests of their own run."""
        path = ROOT / words[0]
        assert path.is_file(), f"there is no {words[0]}"
        assert path.parent == ROOT / "examples", f"nobody tests {words[0]}"
        if self._ranks is not None:  # what the example counts on, where nothing tells it otherwise
            assert self._ranks == (2, 1), "the example asks for other ranks than are started"
            self._ranks = None
            for name in _LAUNCHED:
                os.environ.pop(name, None)

    def _module(self, words: Sequence[str]) -> None:
        """Run `python -m`, with the module's name first among the words."""
        name, *words = words
        if name == "pip":
            _see_extras(words)
            return
        if name.startswith("docs.site."):  # writes into the repository: tests of its own
            assert callable(importlib.import_module(name).main)
            return
        bench = name.startswith("benchmarks.")
        main = importlib.import_module(f"{name}.__main__" if bench else name).main
        with pytest.MonkeyPatch.context() as patch:
            if bench or name.startswith("lightning_commfree."):
                patch.setattr(argparse.ArgumentParser, "parse_known_args", _only_parsed())
            else:
                words = [*self._prepared(words), *SILENT]
            patch.setattr(sys, "argv", [name, *words])
            _call(main)

    def _prepared(self, words: Sequence[str]) -> list[str]:
        """Return a recipe's words as they can be tried here, with what they count on."""
        by_key = dict(word.split("=", 1) for word in words if "=" in word)
        if by_key.get("ckpt_path") == "last":
            shutil.rmtree(by_key["hydra.run.dir"], ignore_errors=True)
            shutil.copytree(COPY, by_key["hydra.run.dir"])
        if "hydra/launcher" not in by_key:
            return list(words)
        # a job of its own for each setting, under SLURM: the first one
        launcher = "hydra.launcher."
        self._launch("SLURM", by_key[f"{launcher}nodes"], by_key[f"{launcher}tasks_per_node"])
        left = [w for w in words if not w.startswith(("hydra/launcher=", launcher, "-m"))]
        overrides = OverridesParser.create().parse_overrides(left)
        return [
            f"{o.get_key_element()}={next(iter(o.sweep_string_iterator()))}"
            if o.is_sweep_override()
            else o.input_line
            for o in overrides
        ]

    def _fit_in_small(self, config: dict[str, Any], build: training.Builder) -> Any:
        """Stand in for `recipes.training.run.fit`, after everything was composed and checked."""
        if self._ranks is not None:
            asked = config["trainer"]["num_nodes"], config["trainer"]["devices"]
            assert asked == self._ranks, "the Trainer counts other ranks than are started"
            for name in _LAUNCHED:
                os.environ.pop(name, None)
            self._ranks = None
        if HydraConfig.get().job.get("num"):  # of a sweep, and not its first job
            return SimpleNamespace(is_global_zero=False)
        _build_in_large(config)
        small, run_dir = shrunk(config), config["run_dir"]
        job = json.dumps(small).replace(run_dir, "RUN_DIR")
        if job in self._done:  # by a command that is another one in large only
            shutil.copytree(self._done[job], run_dir, dirs_exist_ok=True)
            return SimpleNamespace(is_global_zero=True)
        trainer = self._fit(small, build)
        summary = json.loads((Path(run_dir) / SUMMARY_FILE).read_text())
        assert summary["steps"] == (MORE_STEPS - STEPS if config["ckpt_path"] else STEPS)
        assert math.isfinite(summary["validation_loss"])
        self._done[job] = run_dir
        return trainer

    def _run_here(self, job: Job, log: Path, timeout_s: float | None) -> int:
        """Stand in for the process of a comparison's job."""
        log.touch()
        self._module(job.arguments[1:])
        return 0

    def _run_in_laboratory(self, job: Job, asked: Record, plan: Plan) -> Record:
        """Stand in for the nodes of a comparison's job: this process is one of them."""
        self._launch("laboratory", plan.nodes, 1)
        self._module(job.arguments[1:])
        return replace(asked, returncode=0, interface_bytes=[0] * plan.nodes)

    def _beginnings(self, split: Split) -> Iterator[str]:
        """Yield the beginning of one of Shakespeare's works."""
        yield next(self._documents(Shakespeare(), split))[:6_000]


def _build_in_large(config: dict[str, Any]) -> None:
    """Build optimizer and Trainer of the job as it stands, but for the place where it would run."""
    training.factory(config["optimizer"])(nn.Linear(1, 1))
    no_data = cast(TrainingData, None)  # which callbacks ask when there is a fit
    training.build_trainer({**config, "trainer": {**config["trainer"], **_HERE}}, no_data)


def _see_extras(words: Sequence[str]) -> None:
    """See that pip is asked for this repository, and for extras that it has."""
    (asked,) = (word for word in words if word.startswith("."))
    extras = re.fullmatch(r"\.(?:\[([\w,]+)\])?", asked)
    assert extras, f"{asked} is not this repository"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for extra in filter(None, (extras[1] or "").split(",")):
        assert extra in project["optional-dependencies"], f"there is no extra {extra}"


class _Parsed(Exception):  # noqa: N818 -- all has gone well
    """A bench has read its arguments."""


def _only_parsed() -> Any:
    parse = argparse.ArgumentParser.parse_known_args

    def parsed(parser: argparse.ArgumentParser, *args: Any) -> None:
        _, more = parse(parser, *args)
        assert not more, f"nobody reads {more}"
        raise _Parsed

    return parsed


def _call(main: Any) -> None:
    """Call a command; an application of Hydra may run inside of another."""
    state, code = Singleton.get_state(), None
    GlobalHydra.instance().clear()
    try:
        main()
    except _Parsed:
        pass
    except SystemExit as left:
        code = left.code
    finally:
        Singleton.set_state(state)
    assert not code, f"{' '.join(sys.argv)} ended with: {code}"
