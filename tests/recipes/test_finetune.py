"""`recipes.finetune` on a toy model with every strategy, and what it refuses before it launches."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch import Trainer
from omegaconf import OmegaConf
from peft import PeftModel
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from recipes.configuration.sentences import sentence
from recipes.data.tokenizer import byte_tokenizer
from recipes.training.finetuning import build
from recipes.training.finished import evaluate
from recipes.training.pretrained import find_pretrained
from recipes.training.run import fit
from tests.world import run_ranks

CONF = Path(__file__).parents[2] / "conf"
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
PAIRS = [(f"{i}=", " ".join(WORDS[int(digit)] for digit in str(i))) for i in range(60)]
SPLITS = {"train": PAIRS[:50], "validation": PAIRS[50:]}
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
BLOCK_SIZE, STEPS = 32, 40
SMALL = [
    "trainer.devices=2",
    f"trainer.max_steps={STEPS}",
    "trainer.val_check_interval=20",
    "checkpoint_every_n_steps=0",
    "optimizer.lr=1e-2",
    "optimizer.warmup_steps=2",
    "report.sample_tokens=8",
    f"data.block_size={BLOCK_SIZE}",
    "data.batch_size=2",
]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """What a pretraining leaves, and data of three kinds."""
    folder = tmp_path_factory.mktemp("toy")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=257,
        n_positions=BLOCK_SIZE,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.2,  # 0.02 is meant for a hundred times the width
        bos_token_id=byte_tokenizer().bos_token_id,
        eos_token_id=byte_tokenizer().eos_token_id,
    )
    for saved in (GPT2LMHeadModel(config), byte_tokenizer()):
        saved.save_pretrained(folder / "runs" / "1" / "huggingface")
    for split, pairs in SPLITS.items():
        lines = [json.dumps({"prompt": prompt, "response": text}) for prompt, text in pairs]
        (folder / f"responses-{split}").write_text("\n".join(lines))
        chats = [
            [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
            for prompt, text in pairs
        ]
        lines = [json.dumps({"messages": messages}) for messages in chats]
        (folder / f"chat-{split}").write_text("\n".join(lines))
        (folder / f"text-{split}").write_text("".join(p + text for p, text in pairs))
    return folder


def _splits(kind):
    return [] if kind == "dialogues" else SPLITS


@pytest.fixture(scope="module")
def compose_finetune(toy):
    """Compose `conf/finetune.yaml` for the toy model and a kind of data."""

    def composed(run_dir, kind, *overrides):
        own = [
            f"run_dir={run_dir}",
            f"cache_dir={toy}/cache",
            f"model.name_or_path='{toy}/runs/*/huggingface'",
            f"data={kind}",
            *(f"data.corpus.{split}={toy}/{kind}-{split}" for split in _splits(kind)),
            *([f'data.corpus.chat_template="{TEMPLATE}"'] if kind == "chat" else []),
        ]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose("finetune", [*own, *SMALL, *overrides])
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)

    return composed


RUNS = {
    "ddp": ("text", "strategy=ddp"),
    "streaming_diloco": ("chat", "strategy=streaming_diloco strategy.sync_every=10"),
    "distributed_lion": (
        "responses",
        "strategy=distributed_lion optimizer=distributed_lion_finetune data.packing=false",
    ),
    "domino_tp": ("responses", "strategy=domino_tp data.batch_size=4"),
    "lora": (
        "chat",
        "strategy=domino_tp lora=default optimizer.lr=0.02 data.packing=false data.batch_size=4",
    ),
}


@pytest.fixture(scope="module", params=RUNS)
def finished_run(request, compose_finetune, tmp_path_factory):
    kind, overrides = RUNS[request.param]
    folder = tmp_path_factory.mktemp("run")
    fit(compose_finetune(folder, kind, *overrides.split()), build)
    return kind, json.loads((folder / "summary.json").read_text())


def _rows(tokenizer, kind):
    """Yield what a model is given and what it shall answer, for the whole validation split."""
    end = tokenizer.eos_token
    if kind == "text":
        tokens = tokenizer("".join(p + text for p, text in SPLITS["validation"]) + end)["input_ids"]
        for start in range(0, len(tokens) - BLOCK_SIZE, BLOCK_SIZE):
            yield tokens[start : start + 1], tokens[start + 1 : start + BLOCK_SIZE + 1]
        return
    for prompt, text in SPLITS["validation"]:
        given = f"u{prompt}{end}a" if kind == "chat" else prompt
        yield tokenizer(given)["input_ids"], tokenizer(text + end)["input_ids"]


def _plain_loss(folder, kind):
    """The validation loss as anybody would compute it, one example at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    losses = []
    for given, answer in _rows(AutoTokenizer.from_pretrained(folder), kind):
        tokens = torch.tensor([given + answer])
        with torch.no_grad():
            logits = model(input_ids=tokens[:, :-1]).logits[0, len(given) - 1 :]
        losses.append(cross_entropy(logits, tokens[0, len(given) :], reduction="none"))
    return float(torch.cat(losses).mean())


def test_the_validation_loss_falls(finished_run) -> None:
    _, summary = finished_run
    assert summary["steps"] == STEPS
    assert summary["validation_loss"] < summary["initial_loss"] - 0.5


def test_its_losses_are_those_of_plain_transformers(finished_run, toy) -> None:
    """Before and after, however examples were packed, padded or divided among ranks."""
    kind, summary = finished_run
    before = _plain_loss(find_pretrained(f"{toy}/runs/*/huggingface"), kind)
    assert summary["initial_loss"] == pytest.approx(before, rel=1e-4)
    after = _plain_loss(summary["huggingface"], kind)
    assert summary["validation_loss"] == pytest.approx(after, rel=1e-4)
    with open(summary["metrics"]) as file:
        rows = list(csv.DictReader(file))
    [logged] = [float(row["final/initial_loss"]) for row in rows if row["final/initial_loss"]]
    assert logged == pytest.approx(before, rel=1e-4)


def test_evaluate_finds_the_reported_loss(finished_run) -> None:
    _, summary = finished_run
    rows = evaluate(str(Path(summary["huggingface"]).parent))
    loss = float(rows["validation loss"].split()[0])
    assert loss == pytest.approx(summary["validation_loss"], abs=1e-4)


@pytest.mark.parametrize("finished_run", ["streaming_diloco"], indirect=True)
def test_the_chat_template_is_exported_too(finished_run) -> None:
    _, summary = finished_run
    tokenizer = AutoTokenizer.from_pretrained(summary["huggingface"])
    messages = [{"role": "user", "content": "7="}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == f"u7={tokenizer.eos_token}a"


SHARED = ["strategy.replica_size=2", "strategy.inside=fsdp", "strategy.sync_every=1000"]


def _fit(rank, size, config) -> None:
    fit(config, build)


def test_ranks_of_torchrun_read_their_parts_of_the_model_alone(compose_finetune, tmp_path) -> None:
    """And tune it as DDP does: one replica, in which the outer step has nobody to average with."""
    words = ["strategy=streaming_diloco", *SHARED, "strategy.start_method=popen"]
    _, module = build(compose_finetune(tmp_path, "text", *words))
    assert all(parameter.is_meta for parameter in module.model.parameters())

    plain = ["strategy=ddp", "trainer.max_steps=4", "trainer.val_check_interval=2"]
    fit(compose_finetune(tmp_path / "ddp", "text", *plain), build)
    config = compose_finetune(tmp_path / "fsdp", "text", *words[:-1], *plain[1:])
    run_ranks(_fit, 2, tmp_path, config)

    ddp, shared = (
        json.loads((tmp_path / name / "summary.json").read_text()) for name in ("ddp", "fsdp")
    )
    for loss in ("initial_loss", "validation_loss"):
        assert shared[loss] == pytest.approx(ddp[loss], rel=1e-5)
    assert ddp["validation_loss"] < ddp["initial_loss"] - 0.01
    trained = AutoModelForCausalLM.from_pretrained(shared["huggingface"]).state_dict()
    for name, value in AutoModelForCausalLM.from_pretrained(ddp["huggingface"]).named_parameters():
        if not name.endswith("c_attn.bias"):  # the keys' has no gradient, and AdamW takes rounding
            torch.testing.assert_close(trained[name], value.data, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("finished_run", ["lora"], indirect=True)
def test_lora_trains_adapters_alone(finished_run, toy) -> None:
    _, summary = finished_run
    base = AutoModelForCausalLM.from_pretrained(find_pretrained(f"{toy}/runs/*/huggingface"))
    state = torch.load(summary["checkpoint"], weights_only=True)["state_dict"]
    frozen = {k: v for k, v in state.items() if "lora_" not in k and k.startswith("model.")}
    for name, value in frozen.items():
        plain = name.replace("model.base_model.model.", "").replace(".base_layer", "")
        assert torch.equal(value, base.state_dict()[plain]), name
    assert len(frozen) == len(base.state_dict())

    merged = AutoModelForCausalLM.from_pretrained(summary["huggingface"])
    both = PeftModel.from_pretrained(base, summary["adapter"])
    assert both.peft_config["default"].base_model_name_or_path == str(
        toy / "runs" / "1" / "huggingface"
    )
    tokens = torch.arange(BLOCK_SIZE)[None]
    with torch.no_grad():
        with both.disable_adapter():
            before = both(input_ids=tokens).logits
        after = both(input_ids=tokens).logits
        found = merged(input_ids=tokens).logits
    torch.testing.assert_close(found, after, rtol=1e-4, atol=1e-4)
    assert (after - before).abs().max() > 0.1


def test_the_demo(compose_finetune, tmp_path) -> None:
    own = ["experiment=finetune_demo", f"cache_dir={tmp_path}"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("finetune", [f"run_dir={tmp_path}", *own])
    assert config.model.name_or_path == "outputs/pretrain/*/huggingface"
    data, module = build(compose_finetune(tmp_path, "dialogues", *own, *SMALL))
    data.prepare_data()
    assert data.num_rows() > 500
    assert type(data.corpus).__name__ == "Dialogues"
    assert type(module.model).__name__ == "GPT2LMHeadModel"


@pytest.fixture
def refused(compose_finetune, monkeypatch, tmp_path):
    """Run a configuration and return what a person reads; nothing was launched and written."""
    monkeypatch.setattr(Trainer, "fit", lambda *_, **__: pytest.fail("something was launched"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def refused(kind, *overrides):
        with pytest.raises(Exception) as raised:  # noqa: PT011 -- its text is the test's to judge
            fit(compose_finetune(tmp_path / "run", kind, *overrides), build)
        assert not (tmp_path / "run").exists()
        return sentence(raised.value)

    return refused


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        ("text", "data.block_size=64", "more than the model's context of 32 tokens"),
        ("text", "model.name_or_path=no/such-model", "'no/such-model' is neither a folder"),
        ("text", "model.name_or_path=no/such/*", "'no/such/*' matches no folder"),
        ("text", "model.name_or_path=conf", "conf' is neither a folder that `save_pretrained`"),
        ("text", "+model.atn_pdrop=0.1", "has no attribute of that name"),
        ("text", "+model.n_embd=64", "do not fit the model: leave out keys of `model` that change"),
        ("text", "+model.activation_function=abc", "cannot be built from the settings in `model`"),
        (
            "text",
            "lora=default lora.target_modules=abc",
            "cannot be built from the settings in `lora`",
        ),
        ("text", "lora=default +lora.abc=1", "cannot be built from the settings in `lora`"),
        ("responses", "data.corpus.train=no/such.jsonl", "'no/such.jsonl' matches no file"),
        ("responses", "data.corpus.train=README.md", "README.md, line 1: this is not JSON"),
        ("responses", "data.batch_size=99", "The train split has"),
        ("chat", "data.corpus.chat_template=null", "The tokenizer has no chat template"),
    ],
)
def test_it_is_refused_before_a_launch(refused, kind, overrides, message) -> None:
    assert message in refused(kind, *overrides.split())


def test_lora_without_its_library_is_refused(refused, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "`lora` needs the library `peft`: pip install" in refused("text", "lora=default")


def test_a_tokenizer_with_more_words_than_the_model(refused, tmp_path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(tmp_path / "larger")
    overrides = ["tokenizer=pretrained", f"tokenizer.name_or_path={tmp_path}/larger"]
    assert "has 258 tokens, but the model has embeddings for only 257" in refused(
        "text", *overrides
    )


def test_a_new_model_is_refused(compose_finetune, tmp_path) -> None:
    config = compose_finetune(tmp_path, "text")
    config["model"] = {"_target_": "transformers.GPT2Config"}
    with pytest.raises(ValueError, match=r"model._target_=transformers.GPT2Config describes a new"):
        build(config)
