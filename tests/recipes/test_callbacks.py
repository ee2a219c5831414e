"""The groups `callbacks` and `debug`, and the configuration that a run prints and saves."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import callbacks
from omegaconf import OmegaConf
from rich.console import Console
from transformers import AutoModelForCausalLM

from recipes.configuration.resolved import config_tree, load_config
from recipes.training.pretraining import build
from recipes.training.run import fit
from tests.recipes.test_pretrain import SMALL

NEEDS_EMA = pytest.mark.skipif(
    not hasattr(callbacks, "EMAWeightAveraging"), reason="came with Lightning 2.6"
)
DILOCO = ["strategy=streaming_diloco", "strategy.sync_every=5"]
TINY = [*SMALL, "data.corpus.train_characters=20000", "data.corpus.validation_characters=2048"]
# with the warm-up of the debug file
AS_IS = [word for word in TINY if not word.startswith("optimizer.warmup_steps")]


def _summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


@NEEDS_EMA
@pytest.mark.parametrize("strategy", [["strategy=ddp"], DILOCO])
def test_all_callbacks_at_once(strategy, compose_config, tmp_path) -> None:
    chosen = "callbacks=[ema,early_stopping,lr_monitor]"
    # no improvement is large enough, so the second validation ends the run
    early = ["callbacks.early_stopping.patience=1", "callbacks.early_stopping.min_delta=9"]
    ema = ["callbacks.ema.decay=0.8", "optimizer.warmup_steps=2"]
    words = [
        *strategy,
        chosen,
        *early,
        *ema,
        "trainer.max_steps=60",
        "trainer.val_check_interval=10",
    ]
    fit(compose_config(*TINY, *words, "trainer.log_every_n_steps=5"), build)

    run = tmp_path / "run"
    summary = _summary(run)
    assert summary["steps"] == 20
    assert summary["stopped_early"].startswith("Monitored metric val/loss did not improve in the")
    saved = torch.load(summary["checkpoint"], weights_only=True)
    exported = AutoModelForCausalLM.from_pretrained(run / "huggingface").state_dict()
    name = "transformer.wte.weight"
    assert torch.equal(exported[name], saved["state_dict"][f"model.{name}"]), "the average"
    assert saved["averaging_state"]["n_averaged"] == 20
    with open(summary["metrics"]) as file:
        columns = csv.DictReader(file).fieldnames
    assert {"lr/pg1", "lr/pg1-momentum", "lr/pg1-weight_decay"} <= {*columns}


REFUSED = [
    ("callbacks=ema strategy=domino_tp", "`DominoTPStrategy` does not support the callback `EMAW"),
    (
        "callbacks=ema strategy=streaming_diloco strategy.replica_size=2 strategy.inside=fsdp",
        "it copies the full model before it is sharded",
    ),
    (
        "callbacks=ema strategy=elastic_diloco strategy.store=file:///mnt/run trainer.devices=1",
        "each replica would average only the steps since it joined",
    ),
    (
        "+callbacks.swa={_target_:lightning.pytorch.callbacks.StochasticWeightAveraging,swa_lrs:1.0}"
        " strategy=streaming_diloco",
        "it averages the local weights of each replica",
    ),
    ("callbacks=lr_monitor logger=none", "callbacks=lr_monitor writes to loggers"),
    (
        "callbacks=early_stopping callbacks.early_stopping.monitor=val_loss",
        "monitors 'val_loss', which this recipe does not log. Legal are val/loss, val/perp",
    ),
    (
        "callbacks=early_stopping trainer.limit_val_batches=0",
        "trainer.limit_val_batches=0 turns validation off",
    ),
]


@NEEDS_EMA
@pytest.mark.parametrize(("words", "sentence"), REFUSED)
def test_a_wrong_choice_is_refused_before_data_is_read(words, sentence, compose_config) -> None:
    def build_nothing(_):
        pytest.fail("data were read")

    with pytest.raises(ValueError, match=sentence):
        fit(compose_config(*SMALL, *words.split()), build_nothing)


def test_debug_fast_leaves_every_file_of_a_run(compose_config, tmp_path) -> None:
    config = compose_config("debug=fast", *AS_IS, *DILOCO)
    trainer = fit(config, build)
    run = tmp_path / "run"
    assert trainer.world_size == 1
    assert _summary(run)["steps"] == 6
    assert [file.name for file in tmp_path.rglob("*.ckpt")] == ["last.ckpt"]
    assert (run / "huggingface" / "model.safetensors").exists()
    assert load_config(run) == config
    assert "${" not in (run / "config.yaml").read_text()
    with pytest.raises(FileNotFoundError, match="has no config.yaml. Give the folder of a run of"):
        load_config(tmp_path)


def test_debug_overfit_learns_its_batches_by_heart(compose_config, tmp_path, capfd) -> None:
    small = ["data.batch_size=2", "optimizer.lr=3e-2", "trainer.max_steps=80"]
    fit(compose_config("debug=overfit", *AS_IS, "strategy=ddp", *small), build)
    assert "80 on the same 4 rows of each rank" in capfd.readouterr().out
    with open(_summary(tmp_path / "run")["metrics"]) as file:
        losses = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    # far below the entropy of the source, 1.4 nats, which no other batches would allow
    assert losses[-1] < 0.5


def test_debug_profiler_writes_a_file_for_each_rank(compose_config, tmp_path) -> None:
    words = ["trainer.max_steps=4", "trainer.val_check_interval=2", "trainer.limit_val_batches=1"]
    fit(compose_config("debug=profiler", *AS_IS, "strategy=ddp", *words), build)
    for rank in range(2):
        assert "optimizer_step" in (tmp_path / "run" / f"fit-profile-{rank}.txt").read_text()


def test_the_tree_has_every_value() -> None:
    config = {
        "a": {"_target_": "x.Y", "b": {"c": None}},
        "d": [1, "[bold]"],
        "e": {},
        "f": "two\nlines",
    }
    console = Console(width=80, record=True)
    with console.capture() as shown:
        console.print(config_tree(OmegaConf.to_container(OmegaConf.create(config))))
    assert shown.get().splitlines() == [
        "configuration",
        "├── a",
        "│   ├── _target_: x.Y",
        "│   └── b",
        "│       └── c: null",
        '├── d: [1, "[bold]"]',
        "├── e: {}",
        r'└── f: "two\nlines"',
    ]
