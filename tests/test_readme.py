"""Every command and every Python block in READMEs and docs works, checked without real training.

They are collected from the pages, so a new one is tested too. A recipe composes and validates its
configuration and stops before it builds a model. A benchmark parses its arguments. A make target is
printed, and the recipes in it are checked. Examples must exist; they have tests of their own.
`make newcomer-test` runs the first commands for real.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.run import parse_args as parse_torchrun

import lightning_commfree
from commfree_planner.command import main as commfree_plan
from lightning_commfree.stores.command import main as commfree_store
from recipes.comparison import comparing
from recipes.training import run as training
from tests.pages import RECIPES, ROOT, commands_of, programs_in, python_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

READMES = ("README.md", "recipes/README.md", "benchmarks/README.md")
DOCS = tuple(path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("docs/*.md")))
PAGES = {page: (ROOT / page).read_text("utf-8") for page in READMES + DOCS}
COMMANDS = dict.fromkeys(command for text in PAGES.values() for command in commands_of(text))
BLOCKS = [block for text in PAGES.values() for block in python_of(text)]
PUBLIC = {name: getattr(lightning_commfree, name) for name in lightning_commfree.__all__}


class _Checked(Exception):  # noqa: N818 -- everything went well
    """Raised to stop a command once its arguments are checked."""


@pytest.fixture(autouse=True)
def stop_before_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparing, "check_laboratory", lambda plan: None)
    monkeypatch.setattr(comparing, "run_all", _stop)


def _stop(*_: Any) -> None:
    raise _Checked


def try_out(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check everything that a command or script starts; fail where a reader would see an error."""
    batch = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script, re.MULTILINE))
    started = list(programs_in(script))
    assert started, f"{script} starts no program of ours"
    for program, *words in started:
        ranks = None
        if batch:
            ranks = int(batch["nodes"]), int(batch["ntasks-per-node"])
            _pretend_launch("SLURM", ranks, monkeypatch)
        if node := re.search(r"NODE_RANK=(\d)", script):
            monkeypatch.setenv("NODE_RANK", node[1])
        if program == "make":
            _check_make(words, monkeypatch)
        elif program == "commfree-plan":
            _call(lambda words=words: commfree_plan(words))
        elif program == "commfree-store":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(argparse.ArgumentParser, "parse_known_args", _parse_only())
                _call(lambda words=words: commfree_store(words))
        elif program == "torchrun":
            options = parse_torchrun(words)
            ranks = int(options.nnodes.rpartition(":")[2]), int(options.nproc_per_node)
            _pretend_launch("torchrun", ranks, monkeypatch)
            module = ["-m"] if options.module else []
            words = [*module, options.training_script, *options.training_script_args]
            _check_python(words, ranks, monkeypatch)
        else:
            _check_python(words, ranks, monkeypatch)


def _pretend_launch(by: str, ranks: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process look like a rank that torchrun or SLURM has started."""
    world = str(ranks[0] * ranks[1])
    variables = {
        "torchrun": {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": world},
        "SLURM": {"SLURM_JOB_NAME": "train", "SLURM_NTASKS": world},
    }[by]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def _check_make(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # -o: take .venv as up to date, so that only the target's own commands are printed
    stamps = ["-o", ".venv/.set-up-done", "-o", ".venv/.demo-set-up-done"]
    options = ["--no-print-directory", "-n", *stamps, "PY=python"]
    dry = subprocess.run(
        ["make", *options, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert dry.returncode == 0, dry.stderr
    if re.search(r"-m recipes\.", dry.stdout):
        try_out(dry.stdout, monkeypatch)


def _check_python(
    words: Sequence[str], ranks: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if words[0] != "-m":
        path = ROOT / words[0]
        assert path.is_file(), f"there is no {words[0]}"
        if path.parent == ROOT / "examples" / "elastic":
            assert ranks in (None, (1, 1)), "each replica has a torchrun of its own"
            return
        assert path.parent == ROOT / "examples", f"nothing tests {words[0]}"
        if path.stem == "plain_pytorch":
            assert ranks == (1, 2), "torchrun starts both ranks"
        else:
            assert ranks in (None, (2, 1)), "the example needs two nodes with one rank each"
        return
    name, *words = words[1:]
    if name == "pip":
        _check_extras(words)
    elif name.removeprefix("recipes.") in RECIPES:
        _run_recipe(name, words, ranks, monkeypatch)
    elif name.startswith("docs.site."):  # writes into the repository; see test_docs.py
        assert callable(importlib.import_module(name).main)
    else:
        module = importlib.import_module(name)
        if hasattr(module, "__path__"):  # a package, which `-m` runs by its `__main__`
            module = importlib.import_module(f"{name}.__main__")
        main = module.main
        monkeypatch.setattr(sys, "argv", [name, *words])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "parse_known_args", _parse_only())
            _call(main)


def _run_recipe(
    name: str,
    words: Sequence[str],
    ranks: tuple[int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main = importlib.import_module(name).main
    launcher = dict(word.split("=", 1) for word in words if word.startswith("hydra.launcher."))
    if launcher:  # submitit is an extra that the tests do without: check the first job of the sweep
        ranks = tuple(int(launcher[f"hydra.launcher.{n}"]) for n in ("nodes", "tasks_per_node"))
        _pretend_launch("SLURM", ranks, monkeypatch)
        plain = (w for w in words if not w.startswith(("hydra/launcher", "hydra.launcher", "-m")))
        words = [re.sub(r",.*", "", word) for word in plain]

    def fit(config: dict[str, Any], build: Callable[..., Any]) -> Any:
        started = config["trainer"]["num_nodes"], config["trainer"]["devices"]
        assert ranks in (None, started), "the Trainer expects other ranks than the launcher starts"
        return SimpleNamespace(is_global_zero=False)

    monkeypatch.setattr(training, "fit", fit)
    # not "disabled", which would turn off every logger of this process
    monkeypatch.setattr(
        sys, "argv", [name, *words, "hydra/job_logging=none", "hydra/hydra_logging=none"]
    )
    GlobalHydra.instance().clear()
    _call(main)


def _check_extras(words: Sequence[str]) -> None:
    """Check that `pip install .[EXTRA]` names extras that exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for extras in re.findall(r"\.\[([\w,]+)\]", " ".join(words)):
        for extra in extras.split(","):
            assert extra in project["optional-dependencies"], f"there is no extra {extra}"


def _parse_only() -> Callable[..., None]:
    parse = argparse.ArgumentParser.parse_known_args

    def parsed(parser: argparse.ArgumentParser, *args: Any) -> None:
        _, unknown = parse(parser, *args)
        assert not unknown, f"unknown arguments {unknown}"
        raise _Checked

    return parsed


def _call(main: Callable[[], Any]) -> None:
    code = None
    try:
        main()
    except _Checked:
        pass
    except SystemExit as left:
        code = left.code
    assert not code, f"{' '.join(sys.argv)} ended with: {code}"


def _name(command: str) -> str:
    return " ".join(command.partition("#")[0].replace("\\", " ").split()) or "a script"


@pytest.mark.parametrize("command", COMMANDS, ids=_name)
def test_a_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try_out(command, monkeypatch)


@pytest.mark.parametrize(
    ("page", "wrong"),
    [
        ("```console\n$ python -m recipes.pretrain \\\n    trainer.max_stepz=9\n```", "max_stepz"),
        ("Say\n`python -m\nrecipes.plan step_time=1` now.", "`bandwidth` must be given"),
        ("`python -m recipes.pretrian`", "recipes.pretrian"),
        ("`python -m recipes.compare strategies=[dpd]`", "dpd"),
        ("`python -m benchmarks.lion_step --rouns 3`", "--rouns"),
        ("`python -m recipes.pretrain trainer=multinode`", "it would wait for the other nodes"),
        ("`torchrun --nnodes 2 --nproc-per-node 4 -m recipes.pretrain trainer=multinode`", "ranks"),
        ("`torchrun --nnodes 3 examples/two_machines.py`", "needs two nodes"),
        ("`make demonstration`", "demonstration"),
        ("`python examples/no_such.py`", "there is no examples/no_such.py"),
        ("```console\n$ python -m pip install '.[recipe]'\n```", "there is no extra recipe"),
        ("```bash\ncommfree-plan --parameters 10 --blocks 2\n```", "--step-time"),
        ("```bash\nrm -r outputs\n```", "starts no program of ours"),
    ],
)
def test_a_wrong_command_is_found(page: str, wrong: str, monkeypatch, capsys) -> None:
    [command] = commands_of(page)
    with pytest.raises((AssertionError, ImportError)) as failed:
        try_out(command, monkeypatch)
    assert wrong in f"{failed.value}{capsys.readouterr().err}"


def test_the_readme_answers_on_its_first_screen() -> None:
    before, _, after = PAGES["README.md"].partition("\n## Read on\n")
    assert after
    assert len(words_of(before)) <= 700
    relative = [link for link in re.findall(r"\]\(([^)\s]+)\)", before) if "://" not in link]
    # on a package page, only pictures' texts are left of these
    assert relative == re.findall(r"!\[[^\]]{40,}\]\(([^)\s]+)\)", before)
    assert "These links lead into the repository" in after.partition("\n- ")[0]
    for name in PUBLIC:
        assert name in before or not name.endswith("Strategy"), name


def test_how_to_choose_is_short() -> None:
    assert len(words_of(PAGES["docs/choose.md"])) <= 600


def words_of(page: str) -> list[str]:
    return [word for word in page.split() if re.search(r"\w", word)]  # no bars of tables


def test_the_readme_shows_what_the_commands_print(capsys: pytest.CaptureFixture[str]) -> None:
    (_, demo), (plan, planned) = re.findall(
        r"```console\n\$ (.*)\n```\n\n```text\n((?:.*\n)*?)```", PAGES["README.md"]
    )
    commfree_plan(plan.split()[1:])
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in planned.splitlines() if line not in printed] == []
    measured = (ROOT / "benchmarks/demo/result.md").read_text("utf-8")
    for figure in re.findall(r"[\d.]+ (?:nats|MB|GB)", demo):
        assert figure.removesuffix(" nats") in measured, figure


def _calls_shown(block: str) -> Iterator[ast.Call]:
    """Yield the bare calls of public names in a block: they show a signature."""
    for statement in ast.parse(block).body:
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Name(id=name)) as call) if name in PUBLIC:
                yield call


def test_every_strategy_is_shown_with_its_defaults() -> None:
    calls = [call for block in BLOCKS for call in _calls_shown(block)]
    assert {call.func.id for call in calls} == {n for n in PUBLIC if n.endswith("Strategy")}
    inherited = inspect.signature(DDPStrategy.__init__).parameters
    for call in calls:
        own = inspect.signature(PUBLIC[call.func.id].__init__).parameters
        own = {n: p for n, p in own.items() if n != "self" and p.kind is not p.VAR_KEYWORD}
        shown = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        assert list(shown)[: len(own)] == list(own), "all of its own parameters, in their order"
        for name, value in shown.items():
            assert value == {**inherited, **own}[name].default, name


# `test_ray.py` runs the script for Ray, in a process of its own
@pytest.mark.parametrize("block", [block for block in BLOCKS if "TorchTrainer(" not in block])
def test_a_python_block_runs(block: str, monkeypatch) -> None:
    """A Trainer in it trains two steps on one node; a module in it makes an optimizer."""
    short = {"num_nodes": 1, "max_steps": 2, "logger": False, "enable_checkpointing": False}
    trainer = lightning.Trainer
    monkeypatch.setattr(lightning, "Trainer", lambda **kwargs: trainer(**{**kwargs, **short}))
    monkeypatch.setenv("COMMFREE_STORE", "tcp://127.0.0.1:29510")
    names: dict[str, Any] = {
        "L": lightning,
        **PUBLIC,
        "model": BoringModel(),
        "data": BoringDataModule(),
    }
    given = set(names)
    try:
        exec(compile(block, "README", "exec"), names)
        if "trainer" in names:
            assert names["trainer"].global_step == 2
        for name in names.keys() - given:
            if isinstance(names[name], type) and issubclass(names[name], lightning.LightningModule):
                module = names[name]()
                module.layer = torch.nn.Linear(2, 2)
                assert isinstance(module.configure_optimizers(), torch.optim.Optimizer)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
