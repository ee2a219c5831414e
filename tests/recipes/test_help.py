"""What a person reads who asks for help, or has mistyped: `--help`, and sentences for errors."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.singleton import Singleton
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import MissingMandatoryValue
from torch.multiprocessing import ProcessRaisedException, start_processes

from recipes import compare, finetune, plan, pretrain
from recipes.configuration.application import FULL_ERROR, HINT, application
from recipes.configuration.checking import check_config
from recipes.configuration.help import CONF
from recipes.configuration.sentences import sentence
from recipes.configuration.signatures import parameters
from recipes.training.optimizer import warmup_cosine

COMMANDS = {
    "compare": compare.main,
    "finetune": finetune.main,
    "plan": plan.main,
    "pretrain": pretrain.main,
}
GOLDEN = Path(__file__).parent / "golden"  # what commands print; look at a change and copy it
SILENT = ["hydra/job_logging=none", "hydra/hydra_logging=none"]  # "disabled" ends all loggers
Told = Callable[..., str]


@pytest.fixture(autouse=True)
def _hydra_forgets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hydra remembers an application's configuration in singletons; the next test shall not."""
    monkeypatch.delenv(FULL_ERROR, raising=False)
    before = copy.deepcopy(Singleton.get_state())
    yield
    Singleton.set_state(before)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Told:
    """Call a command as from a shell; return what it ends with (1 is the code of any text)."""

    def call(main: Callable[[], None], *words: str) -> str:
        run_dir = f"hydra.run.dir={tmp_path}/run"
        monkeypatch.setattr(sys, "argv", ["command", *words, *SILENT, run_dir])
        with pytest.raises(SystemExit) as stopped:
            main()
        return str(stopped.value.code)

    return call


def test_anothers_experiment_is_refused_with_its_command(told) -> None:
    """It ended with `Could not override 'lora'`."""
    said = told(pretrain.main, "experiment=finetune_demo")
    assert "Run it by python -m recipes.finetune experiment=finetune_demo" in said
    assert "python -m recipes.pretrain experiment=demo" in told(finetune.main, "experiment=demo")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_as_it_is_kept_and_fits_80_columns(name, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["command", "--help"])
    COMMANDS[name]()
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert shown == (GOLDEN / f"help_{name}.txt").read_text()


def test_help_loads_none_of_the_large_libraries() -> None:
    """It took seven seconds, all of them for imports."""
    names = ", ".join(COMMANDS)
    code = (
        f"import sys; sys.argv = ['command', '--help']; from recipes import {names}\n"
        f"for command in ({names}): command.main()\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=CONF.parent, capture_output=True, text=True, check=True
    )
    loaded = set(result.stderr.split())
    assert "hydra" in loaded
    assert not loaded & {"torch", "lightning", "transformers", "matplotlib", "lightning_commfree"}


TRAINER = "not a key of lightning.pytorch.Trainer"
DILOCO = "not a key of lightning_commfree.StreamingDiLoCoStrategy"
CONFIGURATION = "not a key of the configuration"
MISTAKES = [
    ("trainer.max_stepz=9", f"`trainer.max_stepz` is {TRAINER}: did you mean `trainer.max_steps`?"),
    ("trainer.qqq=9", f"`trainer.qqq` is {TRAINER}. There are: accelerator, accumulate_grad_ba"),
    ("trainer.deterministic=true", "write +trainer.deterministic=..."),
    ("trainr.max_steps=9", f"`trainr` is {CONFIGURATION}: did you mean `trainer`?"),
    ("max_steps=9", f"`max_steps` is {CONFIGURATION}: did you mean `trainer.max_steps`?"),
    ("experimentx=demo", f"`experimentx` is {CONFIGURATION}: did you mean `experiment`?"),
    (
        "report.promptt=x",
        "not a key of `report`: did you mean `report.prompt`?",
    ),
    (
        "strategy=diloco",
        "`strategy=diloco` does not exist. There are: ddp, distributed_lion,",
    ),
    ("strategy=streaming", "Did you mean strategy=streaming_diloco?"),
    ("logger=[csv,wandbb]", "Did you mean logger=wandb?"),
    ("callbacks.ema.decay=0.9", "not part of this configuration: select it by callbacks=ema."),
    # added keys, which nobody would read
    ("+trainer.max_stepz=9", f"{TRAINER}: did you mean `trainer.max_steps`?"),
    ("+strategy.sync_evry=2", f"{DILOCO}: did you mean `strategy.sync_every`?"),
    ("+model.n_layers=2", "not a key of transformers.GPT2Config: did you mean `model.n_layer`?"),
    (
        "+data.corpus.trainn=x",
        "is not a key of recipes.data.corpus.Shakespeare.",
    ),
    ("+seeed=2", "`seeed` is not a key of conf/pretrain.yaml: did you mean `seed`?"),
    # not keys but values
    ("data=text", "`data.corpus.train` must be given: add data.corpus.train=... to the command"),
    ("seed=1,2", "To sweep over it, add --multirun"),
]


def _composed(override: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("pretrain", [override, "run_dir=here"])
    check_config(cfg, "pretrain")


@pytest.mark.parametrize(("override", "expected"), MISTAKES)
def test_a_mistyped_override_gets_a_suggestion(override, expected) -> None:
    with pytest.raises((HydraException, MissingMandatoryValue, ValueError)) as wrong:
        _composed(override)
    assert expected in str(sentence(wrong.value))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("trainer.max_stepz=9", "did you mean `trainer.max_steps`?"),
        ("-m seed=1,2 trainer.max_stepz=9", "did you mean `trainer.max_steps`?"),
        ("+seeed=2", "did you mean `seed`?"),
        ("trainer.max_steps=-1", "trainer.max_steps=-1 must be positive"),
        ("callbacks=[{_target_:a.b}]", "Add an object of your own by '+callbacks.NAME={_target_:"),
        (
            "-m seed=1,2 strategy.start_method=popen",
            "cannot be combined with strategy.start_method=popen",
        ),
    ],
)
def test_a_command_ends_with_the_sentence(words, expected, told, tmp_path, capsys) -> None:
    message = told(pretrain.main, *words.split(), f"hydra.sweep.dir={tmp_path}/sweep")
    assert expected in message
    assert message.endswith(HINT)
    assert "Traceback" not in message + capsys.readouterr().err
    assert not list(tmp_path.rglob("*.ckpt"))


def test_every_command_tells_it(told) -> None:
    assert "must be given: add step_time=..." in told(plan.main)
    assert "did you mean `bandwidth`?" in told(plan.main, "bandwidthh=1")
    assert "did you mean `trainer.max_steps`?" in told(finetune.main, "trainer.max_stepz=9")


def test_legal_overrides_pass(told) -> None:
    """Keywords that are passed on to others, and a key of the user's own that another refers to."""
    added = ["+strategy.bucket_cap_mb=10", "+trainer.deterministic=true", "+logger.wandb.notes=x"]
    mine = ["+my_length=-7", "trainer.max_steps=${my_length}", "logger=wandb", "strategy=ddp"]
    message = told(pretrain.main, *mine, *added)
    assert message.startswith("trainer.max_steps=-7 must be positive"), "the keys were accepted"
    taken, accepts_any = parameters("transformers.GPT2Config")
    assert not accepts_any
    assert {"n_embd", "hidden_size", "vocab_size"} <= {*taken}, "by either name, and inherited ones"


def test_a_bug_shows_its_traceback(monkeypatch, tmp_path) -> None:
    def broken(cfg: DictConfig) -> None:
        assert FULL_ERROR not in os.environ, "what a job starts reports as it does"
        int("no number")

    words = [*SILENT, "step_time=1", "bandwidth=1", f"hydra.run.dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["command", *words])
    with pytest.raises(ValueError, match="invalid literal for int"):
        application("plan")(broken)()
    assert FULL_ERROR not in os.environ


def test_hydras_variable_shows_all(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv(FULL_ERROR, "1")
    words = [*SILENT, "trainer.max_steps=-1", f"hydra.run.dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["command", *words])
    with pytest.raises(ValueError, match="trainer.max_steps=-1 must be positive"):
        pretrain.main()


def _refuses(rank: int) -> None:
    warmup_cosine(torch.optim.SGD([torch.zeros(1)]), 3, 9, 0.1)


def _breaks(rank: int) -> None:
    int("no number")


def test_a_refusal_in_a_worker_is_told_too() -> None:
    with pytest.raises(ProcessRaisedException) as refused:
        start_processes(_refuses, nprocs=1, start_method="fork")
    told = sentence(refused.value)
    assert told is not None
    assert told.startswith("warmup_steps=9 must be at least 0 and less than the run's 3 steps.")
    with pytest.raises(ProcessRaisedException) as broken:
        start_processes(_breaks, nprocs=1, start_method="fork")
    assert sentence(broken.value) is None
