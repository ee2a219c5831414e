"""`python -m recipes.compare`: a real comparison at toy size, and what ends it."""

from __future__ import annotations

import copy
import json
import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.singleton import Singleton
from PIL import Image

from recipes import compare as recipe
from recipes.comparison import comparing, running
from recipes.comparison.jobs import OWN_KEYS, RECIPE, Job, Plan, build_jobs
from recipes.comparison.running import Record
from tests.forks import forking

CONF = Path(__file__).parents[2] / "conf"
TOY = [
    "data=synthetic",
    "data.corpus.train_characters=20000",
    "data.corpus.validation_characters=4000",
    "tokenizer=bytes",
    "model.n_embd=16",
    "model.n_layer=1",
    "model.n_head=2",
    "trainer.max_steps=6",
    "trainer.val_check_interval=3",
    "trainer.log_every_n_steps=2",
    "optimizer.warmup_steps=2",
    "report.sample_tokens=1",
    "logger=none",
]


@pytest.fixture(autouse=True, scope="module")
def _hydra_forgets() -> Iterator[None]:
    """Hydra remembers an application's configuration in singletons, and its log's stream, which is
    closed when a test is over; other tests shall not."""
    before, handlers = copy.deepcopy(Singleton.get_state()), logging.getLogger().handlers[:]
    yield
    Singleton.set_state(before)
    logging.getLogger().handlers[:] = handlers


def run_main(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    """Run the command in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["compare", *words])
    try:
        recipe.main()
    except SystemExit as left:
        return left.code
    return 0


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("compare") / "run"
    words = ["strategies=[ddp,domino_tp]", *TOY, f"run_dir={folder}", f"cache_dir={folder}/cache"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(running, "subprocess", forking)
        assert run_main(monkeypatch, *words) == 0
    return folder, words


def test_two_strategies_train_on_the_same_tokens_and_a_page_shows_them(compared) -> None:
    folder, words = compared
    found = {}
    for name in ("ddp", "domino_tp"):
        found[name] = json.loads((folder / name / "summary.json").read_text())
        history = json.loads((folder / name / "history.json").read_text())
        assert history["tokens_per_step"] == 2 * 16 * 64
        assert history["validation_steps"] == [3, 6]
    # the same seed, model, batches and optimizer: both take the same steps, to rounding
    losses = [summary["validation_loss"] for summary in found.values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    text = (folder / comparing.PAGE_FILE).read_text()
    for summary in found.values():
        assert f"<td>{summary['validation_loss']:.4f}</td>" in text
        assert f"<td>{summary['seconds_waited']:.3g} s</td>" in text
    assert "python -m recipes.compare &#39;strategies=[ddp,domino_tp]&#39; data=synthetic" in text
    assert Image.open(folder / comparing.FIGURE_FILE).format == "PNG"
    logs = sorted(folder.rglob("*.log"))  # Hydra left empty ones besides
    assert [str(log.relative_to(folder)) for log in logs] == [
        "ddp/output.log",
        "domino_tp/output.log",
    ]
    assert all(log.stat().st_size for log in logs)


def test_strategies_of_ones_own_reach_the_jobs(monkeypatch, tmp_path) -> None:
    mine = tmp_path / "mine"
    (mine / "strategy").mkdir(parents=True)
    shutil.copy(CONF / "strategy" / "ddp.yaml", mine / "strategy" / "fast.yaml")
    started = []

    def note(job: Job, plan: Plan) -> Record:
        started.append(job.arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "run", note)
    words = ("--config-dir", str(mine), "strategies=[fast]", f"run_dir={tmp_path}/run")
    assert run_main(monkeypatch, *words) == 130
    [arguments] = started
    assert arguments[2:5] == ["--config-dir", str(mine), "strategy=fast"]


def test_ctrl_c_says_how_to_continue(monkeypatch, tmp_path, capsys) -> None:
    def press(job: Job, plan: Plan) -> Record:
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "run", press)
    assert run_main(monkeypatch, "strategies=[ddp]", f"run_dir={tmp_path}/run") == 130
    assert f"are kept: add run_dir={tmp_path}/run to continue." in capsys.readouterr().err


def test_the_configuration_has_the_comparisons_keys_and_the_jobs() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config, job = compose("compare"), compose(RECIPE)
        plan = comparing.read_plan(config, Path())
        jobs = build_jobs(plan, [])
    assert set(config) - set(job) | {"run_dir"} == set(OWN_KEYS)
    assert set(job) <= set(config)
    # nothing of a job is set here: jobs are composed from their own configuration
    assert {key for key in job if config._get_node(key) != job._get_node(key)} == {"run_dir"}
    assert [job.name for job in jobs] == list(config.overrides)
