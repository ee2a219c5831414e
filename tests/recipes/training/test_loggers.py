"""What loggers are given: read back from the files that a run leaves, W&B's own among them."""

from __future__ import annotations

import csv
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import wandb
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipes.training.loggers import RUN_ID_FILE, CsvJobLogger, WandbJobLogger
from recipes.training.pretraining import build
from recipes.training.run import fit

CONF = Path(__file__).parents[3] / "conf"
STEPS, EVERY = 40, 4
SMALL = [
    "data=synthetic",
    "tokenizer=bytes",
    "data.corpus.train_characters=60000",
    "data.corpus.validation_characters=3000",
    "data.block_size=16",
    "model.n_embd=8",
    "model.n_layer=3",
    "model.n_head=2",
    "optimizer.warmup_steps=2",
    "report.sample_tokens=2",
    f"trainer.max_steps={STEPS}",
    f"trainer.log_every_n_steps={EVERY}",
    "trainer.val_check_interval=20",
    "checkpoint_every_n_steps=0",
]
ALL_LOGGERS = [
    "logger=[csv,tensorboard,wandb]",
    "logger.wandb.mode=offline",
    "logger.wandb.group=a comparison",
    "logger.wandb.tags=[one,two]",
    "logger.wandb.name=a run",
]
# what a person plots, under every strategy, and what those that count add
ALWAYS = {
    "train/loss",
    "val/loss",
    "val/perplexity",
    "final/val_loss",
    "final/unigram_loss",
    "tokens/s",
    "comm/bytes_sent",
    "lr/pg1",
    "lr/pg2",
    "epoch",
}
COMM = {"comm/bytes_per_step", "comm/exposed_ms", "comm/compression"}
OUTER = ("abstentions", "bytes", "cosine", "flight_ms", "gradient_norm", "lr", "waited_ms")
DILOCO = ALWAYS | COMM | {f"outer/{name}_{fragment}" for name in OUTER for fragment in (0, 1)}
VOTE = ("ties", "zeros", "agreement", "bits_up", "bits_down", "abstentions")
LION = ALWAYS | COMM | {f"lion/{name}" for name in VOTE}


def _config(folder: Path, *overrides: str) -> dict[str, Any]:
    folders = [f"run_dir={folder}", f"cache_dir={folder}/cache"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("pretrain", [*SMALL, *folders, *overrides])
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


def _records(folder: Path) -> list[dict[str, Any]]:
    """Return what an offline run holds, by W&B's own reader."""
    [file] = (folder / "wandb").glob("offline-run-*/run-*.wandb")  # one run, and none besides
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    shown = subprocess.run(inspect, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in shown.splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two forked ranks with all loggers at once; configuration, folder, and W&B's records."""
    folder = tmp_path_factory.mktemp("run")
    config = _config(folder, *ALL_LOGGERS, "strategy=streaming_diloco", "strategy.sync_every=4")
    fit(config, build)
    return config, folder, _records(folder)


def _of_kind(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record[kind] for record in records if record["type"] == kind]


def _rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "csv" / "version_0" / "metrics.csv") as file:
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]


def test_the_keys_are_these_and_no_others(finished) -> None:
    _, folder, records = finished
    items = [row["item"] for row in _of_kind(records, "history")]
    found = {key for item in items for key in item if key[0] != "_"}
    assert found == DILOCO | {"trainer/global_step"}
    assert {key for row in _rows(folder) for key in row} == DILOCO | {"step"}


def test_every_row_is_in_every_logger(finished) -> None:
    _, folder, records = finished
    items = [row["item"] for row in _of_kind(records, "history")]
    events = EventAccumulator(str(folder / "tensorboard" / "version_0")).Reload()
    trained, validated = list(range(EVERY - 1, STEPS, EVERY)), [19, 39]
    # a mean over 20 batches is there from the 21st on; the last one's row is the 24th
    expected = {"train/loss": trained, "tokens/s": trained[5:], "val/loss": validated}
    for key, steps in {**expected, "lr/pg1": trained, "final/val_loss": [STEPS]}.items():
        by_wandb = {i["trainer/global_step"]: i[key] for i in items if key in i}
        by_csv = {int(row["step"]): float(row[key]) for row in _rows(folder) if key in row}
        by_tensorboard = {event.step: event.value for event in events.Scalars(key)}
        assert list(by_csv) == steps
        assert by_wandb == pytest.approx(by_csv, rel=1e-6)
        assert by_tensorboard == pytest.approx(by_csv, rel=1e-6), "kept in fp32"


def test_the_whole_configuration_is_in_every_logger(finished) -> None:
    config, folder, records = finished
    logged: dict[str, Any] = {}
    for record in _of_kind(records, "config"):
        logged |= record["update"]
    # what is launched with is written as it is: `popen` where something else launches
    assert {key: logged[key] for key in config} == config
    assert logged["strategy"]["sync_every"] == 4
    for name in ("csv", "tensorboard"):
        written = yaml.safe_load((folder / name / "version_0" / "hparams.yaml").read_text())
        assert {key: written[key] for key in config} == config


def test_a_run_says_what_it_belongs_to_and_how_to_find_it(finished) -> None:
    _, folder, records = finished
    [run] = _of_kind(records, "run")
    assert (run["display_name"], run["run_group"], run["tags"]) == (
        "a run",
        "a comparison",
        ["one", "two"],
    )
    assert (folder / RUN_ID_FILE).read_text().strip() == run["run_id"]
    [end] = _of_kind(records, "exit")
    assert end["exit_code"] == 0


def test_the_keys_of_votes(tmp_path) -> None:
    votes = ["strategy=distributed_lion", "optimizer=distributed_lion", "logger=csv"]
    fit(_config(tmp_path, *votes), build)
    assert {key for row in _rows(tmp_path) for key in row} == LION | {"step"}


def test_no_run_is_opened_by_a_process_that_only_launches(tmp_path) -> None:
    """Lightning's own logger opens one when it is pickled, to hand it to spawned processes."""
    logger = WandbJobLogger(save_dir=str(tmp_path), mode="offline")
    copy = pickle.loads(pickle.dumps(logger))
    assert wandb.run is None
    assert not list(tmp_path.iterdir())
    assert copy.version is None


def test_every_job_has_a_run_of_its_own_and_may_continue_one(tmp_path) -> None:
    try:
        for job, run_id in (("a", None), ("b", "chosen"), ("b", "chosen")):
            (tmp_path / job).mkdir(exist_ok=True)
            logger = WandbJobLogger(
                save_dir=str(tmp_path / job), mode="offline", id=run_id, resume="allow"
            )
            logger.log_metrics({"train/loss": 1.0}, step=1)
            logger.finalize("failed" if job == "a" else "success")
            assert wandb.run is None, "the next job would write into this run"
        disabled = WandbJobLogger(save_dir=str(tmp_path), mode="disabled")
        disabled.log_metrics({"train/loss": 1.0}, step=1)
        disabled.finalize("success")
        with pytest.raises(ValueError, match="(?s)W&B could not open a run: .*=offline"):
            WandbJobLogger(save_dir=str(tmp_path), mode="of line").log_metrics({"a": 1.0})
    finally:
        wandb.teardown()
    assert (tmp_path / "b" / RUN_ID_FILE).read_text() == "chosen\n"
    assert (tmp_path / "a" / RUN_ID_FILE).read_text() != "chosen\n"
    [of_a] = _of_kind(_records(tmp_path / "a"), "exit")
    assert of_a["exit_code"] == 1
    assert not (tmp_path / RUN_ID_FILE).exists()
    assert not (tmp_path / "wandb").exists(), "neither the disabled nor the refused one"


def test_a_resumed_job_continues_its_csv_file(tmp_path, recwarn) -> None:
    """It went into a folder of its own, `version_1`, and nobody had both halves."""
    first = CsvJobLogger(str(tmp_path))
    for step in (0, 10, 20, 30):
        first.log_metrics({"loss": float(step)}, step)
    first.save()

    second = CsvJobLogger(str(tmp_path))
    second.log_hyperparams({"seed": 1})
    assert [row["step"] for row in _rows(tmp_path)] == ["0", "10", "20", "30"], "none is lost yet"
    second.log_metrics({"loss": 21.0, "rate": 1.0}, 20)  # the checkpoint was of step 15
    second.log_metrics({"loss": 31.0}, 30)
    second.save()
    rows = _rows(tmp_path)
    assert [(row["step"], row["loss"]) for row in rows] == [
        ("0", "0.0"),
        ("10", "10.0"),
        ("20", "21.0"),
        ("30", "31.0"),
    ]
    assert rows[2]["rate"] == "1.0"
    assert [path.name for path in (tmp_path / "csv").iterdir()] == ["version_0"]
    assert not [w for w in recwarn if "will be deleted" in str(w.message)]
