"""`python -m recipes.pretrain` as a person runs it, and what it refuses before it launches."""

from __future__ import annotations

import csv
import json
import math
import multiprocessing
import re
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch import Trainer
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

# transformers would import it when a run makes a model, and each forked run again
from transformers.models.gpt2 import modeling_gpt2  # noqa: F401

from recipes import evaluate, generate
from recipes.data.corpus import MarkovChain
from recipes.pretrain import main
from recipes.training.pretraining import build, build_data
from recipes.training.report import load_trained
from recipes.training.run import fit

ROOT = Path(__file__).parents[2]
# letters with a known entropy and a model of the smallest size that can learn it
SMALL = [
    "data=synthetic",
    "tokenizer=bytes",
    "data.corpus.num_states=8",
    "data.corpus.train_characters=200000",
    "data.corpus.validation_characters=20000",
    "data.block_size=32",
    "model.n_embd=32",
    "model.n_layer=1",
    "model.n_head=2",
    "+model.initializer_range=0.2",  # 0.02 is meant for a hundred times the width
    "optimizer.lr=1e-2",
    "optimizer.warmup_steps=10",
    "report.sample_tokens=20",
]
CHAIN = MarkovChain(num_states=8, train_characters=200_000, validation_characters=20_000)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The tokens of `SMALL`, which the first run makes for all."""
    return tmp_path_factory.mktemp("cache")


def _command(folder, cache, *overrides) -> subprocess.CompletedProcess[str]:
    """In a fork of this process, which has imported everything; `test_printed` starts a new one."""
    out, err = folder / "out.txt", folder / "err.txt"
    folders = [f"hydra.run.dir={folder}/run", f"cache_dir={cache}"]

    def play() -> None:
        sys.argv = ["recipes.pretrain", *SMALL, *folders, *overrides]
        GlobalHydra.instance().clear()
        with out.open("w", buffering=1) as sys.stdout, err.open("w", buffering=1) as sys.stderr:
            try:
                main()
            except SystemExit as end:  # its text is the interpreter's to print, later
                print(end.code, file=sys.stderr)
                raise

    process = multiprocessing.get_context("fork").Process(target=play)
    process.start()
    process.join(100)
    if process.is_alive():
        process.kill()
        process.join()
    texts = out.read_text(), err.read_text()
    return subprocess.CompletedProcess(sys.argv, process.exitcode, *texts)


DDP = "strategy=ddp"
DILOCO = "strategy=streaming_diloco strategy.sync_every=5"
LION = "strategy=distributed_lion optimizer=distributed_lion"
# one node of two ranks, whose checkpoints are folders
FOLDERS = "{_target_:lightning_commfree.FSDPSettings,folder_above_bytes:0}"
FSDP = f"{LION} strategy.node_size=2 strategy.inside={FOLDERS}"
DOMINO = "strategy=domino_tp data.batch_size=32"  # as many tokens a step as the others


@pytest.fixture(scope="module", params=[DDP, DILOCO, LION, FSDP, DOMINO])
def finished_run(request, tmp_path_factory, cache):
    folder = tmp_path_factory.mktemp("pretrain")
    steps = [
        "trainer.max_steps=120",
        "trainer.val_check_interval=50",
        "checkpoint_every_n_steps=90",
    ]
    result = _command(folder, cache, *request.param.split(), *steps)
    assert result.returncode == 0, result.stderr
    return result.stdout, json.loads((folder / "run" / "summary.json").read_text()), folder


def test_it_learns_what_there_is_to_learn(finished_run) -> None:
    _, summary, _ = finished_run
    # no model is better than the source, from which 20 kB of text deviate by less than 0.03 nats
    assert CHAIN.entropy_nats - 0.03 < summary["validation_loss"] < CHAIN.entropy_nats + 0.05
    assert summary["validation_loss"] < summary["unigram_loss"] - 0.5


def test_rank_0_alone_speaks_and_names_files_that_are_there(finished_run) -> None:
    shown, summary, folder = finished_run
    assert shown.count("Before training") == shown.count("After training") == 1
    assert shown.count("configuration\n├── ") == 1, "print_config=true is the default"
    assert shown.count("├── checkpoint_every_n_steps: 90\n") == 1
    assert shown.index("├── seed: ") < shown.index("Before training")
    assert re.search(r"loss \d\.\d+, val \d\.\d+, [\d,]+ tokens/s, [\d.,]+ kB/step", shown)
    assert "Traceback" not in shown
    run = folder / "run"
    assert summary["checkpoint"] == str(run / "checkpoints" / "last.ckpt")
    assert sorted(file.name for file in (run / "checkpoints").glob("*.ckpt")) == [
        "last.ckpt",
        "step-90.ckpt",
    ]
    assert not list(folder.rglob("*.log")), "Hydra left an empty one; the terminal has it all"
    assert Image.open(summary["figure"]).format == "PNG"
    with open(summary["metrics"]) as file:
        rows = list(csv.DictReader(file))
    [final] = [float(row["final/val_loss"]) for row in rows if row["final/val_loss"]]
    assert final == pytest.approx(summary["validation_loss"])
    assert [row["step"] for row in rows if row["val/loss"]] == ["49", "99"]
    assert summary["sample"]


@pytest.mark.parametrize("strategy", [DDP, LION])
def test_a_run_that_ends_in_nan_says_so_and_leaves_what_is_there(strategy, tmp_path, cache) -> None:
    words = [*strategy.split(), "trainer.max_steps=12", "trainer.log_every_n_steps=1"]
    result = _command(tmp_path, cache, *words, "optimizer.lr=1e25")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr + result.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["failure"] in result.stderr
    assert re.search(r"\bnan\b|NaN", summary["failure"]), "what has happened"
    assert result.stdout.count("Ended by an error") + result.stdout.count("After training") == 1
    assert (summary["validation_loss"], summary["huggingface"]) == (None, None)
    assert not (tmp_path / "run" / "huggingface").exists(), "nobody tunes it by mistake"
    assert Image.open(summary["figure"]).format == "PNG"
    history = json.loads((tmp_path / "run" / "history.json").read_text())
    assert 0 < history["train_loss"][0] < 10
    with open(summary["metrics"]) as file:
        assert next(row for row in csv.DictReader(file) if row["train/loss"])


def test_the_newest_checkpoint_gives_the_printed_loss(finished_run, cache, compose_config) -> None:
    shown, summary, _ = finished_run
    data = build_data(compose_config(*SMALL, f"cache_dir={cache}", "strategy=ddp"))
    module = load_trained(Path(summary["checkpoint"]))
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    [metrics] = trainer.validate(module, datamodule=data, verbose=False)
    # the same sums in another order, on one rank instead of two
    assert metrics["val/loss"] == pytest.approx(summary["validation_loss"], rel=1e-6)
    [printed] = re.findall(r"validation loss +(\d+\.\d+)", shown)
    assert metrics["val/loss"] == pytest.approx(float(printed), abs=6e-5)


def test_the_exported_folder_gives_the_printed_loss(finished_run) -> None:
    _, summary, _ = finished_run
    model = AutoModelForCausalLM.from_pretrained(summary["huggingface"])
    tokenizer = AutoTokenizer.from_pretrained(summary["huggingface"])
    [text] = CHAIN.documents("validation")
    tokens = torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
    rows = tokens[: len(tokens) - (len(tokens) - 1) % 32].unfold(0, 33, 32)
    with torch.no_grad():
        logits = model(input_ids=rows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    assert float(loss) == pytest.approx(summary["validation_loss"], rel=1e-5)


def _printed(main, capsys, monkeypatch, *words) -> tuple[str, str]:
    """Return output and errors of a command in this process."""
    monkeypatch.setattr(sys, "argv", ["command", *words])
    try:
        main()
    except SystemExit as end:  # its text is the interpreter's to print, later
        return capsys.readouterr().out, str(end.code)
    return capsys.readouterr()


@pytest.mark.parametrize("finished_run", [DDP], indirect=True)
def test_evaluate_prints_the_loss_again(finished_run, capsys, monkeypatch, tmp_path) -> None:
    _, summary, folder = finished_run
    shown, _ = _printed(evaluate.main, capsys, monkeypatch, str(folder / "run"))
    assert shown.count(f"{summary['validation_loss']:.4f} nats per token") == 2, "and the reported"
    assert f"{summary['perplexity']:.2f}" in shown
    _, told = _printed(evaluate.main, capsys, monkeypatch, str(tmp_path))
    assert "has no config.yaml. Give the folder of a run of recipes.pretrain" in told


@pytest.mark.parametrize("finished_run", [DDP], indirect=True)
def test_generate_continues_a_prompt(finished_run, capsys, monkeypatch, tmp_path) -> None:
    _, summary, folder = finished_run

    def told(*words: str) -> tuple[str, str]:
        return _printed(generate.main, capsys, monkeypatch, *words)

    prompt, run = ["--prompt", "abca"], str(folder / "run")
    text, _ = told(run, *prompt, "--tokens", "9")
    assert text.startswith("abca")
    assert len(text) == 4 + 9 + 1, "letters are tokens; and the end of the line"
    assert told(run, *prompt, "--tokens", "9")[0] == text, "the same seed"
    greedy, note = told(summary["huggingface"], *prompt, "--temperature", "0")
    assert greedy == told(run, *prompt, "--temperature", "0", "--seed", "5")[0]
    assert "The model's context of 32 leaves room for 28 tokens." in note
    assert "has 32 tokens, but the context of the model is 32" in told(run, "--prompt", "a" * 32)[1]
    assert "has no huggingface/config.json" in told(str(tmp_path), *prompt)[1]


@pytest.mark.parametrize("finished_run", [DDP], indirect=True)
def test_a_run_continues_from_its_checkpoint(finished_run, cache, tmp_path) -> None:
    """120 steps in one go, and 90 and then 30: the same losses, bit for bit on one machine."""
    _, _, folder = finished_run
    settings = ["trainer.max_steps=120", f"ckpt_path={folder}/run/checkpoints/step-90.ckpt"]
    result = _command(tmp_path, cache, "strategy=ddp", "logger=csv", *settings)
    assert result.returncode == 0, result.stderr
    losses = []
    for run in (folder / "run", tmp_path / "run"):
        with open(run / "csv" / "version_0" / "metrics.csv") as file:
            rows = {
                row["step"]: row["train/loss"] for row in csv.DictReader(file) if row["train/loss"]
            }
        losses.append((rows["99"], rows["119"]))
    assert losses[0] == losses[1]


def test_one_process_on_a_checkpoint_of_the_users_own_callbacks(
    cache, compose_config, tmp_path
) -> None:
    (tmp_path / "run").mkdir()
    config = compose_config(
        *SMALL,
        f"cache_dir={cache}",
        "strategy=ddp",
        "trainer.devices=1",
        "trainer.max_steps=11",
        "logger=none",
        "+callbacks.timer={_target_: lightning.pytorch.callbacks.Timer, duration: '00:01:00:00'}",
    )
    trainer = fit(config, build)
    assert [type(c).__name__ for c in trainer.callbacks if type(c).__name__ == "Timer"] == ["Timer"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"] is None


class Witness(pl.Callback):
    """Fails a fit whose model was not compiled, or did not compute its activations again."""

    def __init__(self, compiled: bool, forwards: int) -> None:
        self.compiled, self.forwards = compiled, forwards
        self.seen = 0

    def on_train_start(self, trainer, pl_module) -> None:
        def count(*_) -> None:
            self.seen += 1

        if not self.compiled:  # a hook would be compiled, too
            # before the forward: the second one ends as soon as backward has what it needs
            pl_module.model.transformer.h[0].attn.register_forward_pre_hook(count)

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        if self.compiled:
            assert torch._dynamo.utils.counters["frames"]["ok"] > 0
        else:
            assert self.seen == self.forwards
        self.seen = 0


@pytest.mark.parametrize(
    ("overrides", "compiled", "forwards"),
    [
        ([DILOCO, "compile=eager"], True, 1),
        ([DILOCO, "gradient_checkpointing=true", "trainer.precision=bf16-mixed"], False, 2),
        ([DDP], False, 1),
    ],
    ids=["diloco-compiled", "diloco-checkpointed", "ddp-plain"],
)
def test_compiled_and_checkpointed(overrides, compiled, forwards, compose_config, tmp_path) -> None:
    (tmp_path / "run").mkdir()
    witness = (
        f"+callbacks.witness={{_target_: {__name__}.Witness, compiled: {compiled},"
        f" forwards: {forwards}}}"
    )
    settings = ["trainer.max_steps=11", "logger=none", "report.sample_tokens=1", witness]
    # batches of one shape: every other one would be compiled, too
    settings += ["data.corpus.validation_characters=2048", "optimizer.warmup_steps=5"]
    fit(compose_config(*SMALL, *" ".join(overrides).split(), *settings), build)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["validation_loss"] < math.log(257), "better than knowing nothing"


@pytest.fixture
def no_launch(monkeypatch):
    monkeypatch.setattr(Trainer, "fit", lambda *_, **__: pytest.fail("something was launched"))


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        (b"", "The train split is empty: the files or dataset in `data` contain no text"),
        (b"too short for a block", r"The train split has 0 blocks of 64 tokens \(and 22 tokens in"),
        (b"na\xefve", r"train.txt' is not UTF-8: byte 0xef at offset 2"),
    ],
)
def test_text_that_cannot_be_trained_on(compose_config, corpus, tmp_path, train, sentence) -> None:
    [file] = corpus.files["train"]
    file.write_bytes(train)
    paths = [f"data.corpus.{split}={found[0]}" for split, found in corpus.files.items()]
    config = compose_config("data=text", *paths, "strategy=ddp", "tokenizer=bytes")
    with pytest.raises(ValueError, match=sentence):
        fit(config, build)
    assert not (tmp_path / "run").exists()
    half_written = [f for f in (tmp_path / "cache").glob("*") if f.name.startswith(".building-")]
    assert half_written == []


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "data=text data.corpus.train=no/such/*.txt data.corpus.validation=README.md",
            r"data.corpus.train: 'no/such/\*.txt' matches no file",
        ),
        ("trainer.max_steps=10", "warmup_steps=10 must be at least 0 and less than"),
        ("strategy=domino_tp compile=inductor", "domino_tp cannot be combined with compile=induct"),
        ("ckpt_path=no/such.ckpt", r"ckpt_path='no/such.ckpt' does not exist"),
        ("trainer.max_steps=-1", r"trainer.max_steps=-1 must be positive"),
        (
            "~optimizer +optimizer={_target_:torch.optim.SGD,lr:0.1}",
            "`optimizer` cannot be created: .* is not iterable. Its `_target_` is called with the",
        ),
    ],
)
def test_it_is_refused_before_a_launch(compose_config, words, sentence) -> None:
    small = [] if words.startswith(("data=text", "~optimizer")) else SMALL
    with pytest.raises(Exception, match=sentence):
        fit(compose_config(*small, "strategy=ddp", *words.split()), build)


@pytest.mark.parametrize("optimizer", ["adamw", "distributed_lion"])
def test_lion_needs_its_optimizer_before_anything_is_loaded(compose_config, optimizer) -> None:
    class ReachedError(Exception):
        pass

    def build_nothing(_):
        raise ReachedError

    config = compose_config(*SMALL, "strategy=distributed_lion", f"optimizer={optimizer}")
    refused = pytest.raises(ValueError, match=r"cannot use AdamW.* Set optimizer=distributed_lion")
    with refused if optimizer == "adamw" else pytest.raises(ReachedError):
        fit(config, build_nothing)
