from __future__ import annotations

import functools
import math

import pytest
import torch
from huggingface_hub import constants
from lightning.pytorch.strategies import DDPStrategy
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig

from recipes.data.corpus import MarkovChain
from recipes.data.token_data import TokenDataModule
from recipes.data.tokenizer import byte_tokenizer
from recipes.training.evaluation import token_loss
from recipes.training.language_model import LanguageModel
from recipes.training.optimizer import adamw_cosine

BLOCK_SIZE = 16
GPT2 = GPT2Config(
    vocab_size=257,
    n_positions=BLOCK_SIZE,
    n_embd=8,
    n_layer=2,
    n_head=2,
    initializer_range=0.5,  # far from uniform: a wrong weight in a mean would show
    resid_pdrop=0.5,
)
LLAMA = LlamaConfig(
    vocab_size=257,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=BLOCK_SIZE,
)


@pytest.fixture
def data(tmp_path):
    # 7 blocks in batches of 2: two ranks get 4 and 3 blocks, and each a last batch of its own size
    corpus = MarkovChain(26, 40 * BLOCK_SIZE, 7 * BLOCK_SIZE)
    return TokenDataModule(corpus, byte_tokenizer(), str(tmp_path), BLOCK_SIZE, batch_size=2)


def _plain_loss(model, data):
    """The loss as anybody would compute it: every validation block once, one at a time."""
    blocks = data.blocks("validation")
    rows = torch.stack([blocks[i] for i in range(len(blocks))])
    with torch.no_grad():
        logits = model.eval()(input_ids=rows[:, :-1]).logits
    log_p = logits.log_softmax(-1).gather(-1, rows[:, 1:, None])
    return float(-log_p.double().mean())


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_loss_is_that_of_transformers(config) -> None:
    module = LanguageModel(config.to_dict()).eval()
    batch = torch.randint(0, 257, (3, BLOCK_SIZE + 1))
    inputs, targets = batch[:, :-1], batch[:, 1:].contiguous()
    theirs = module.model(input_ids=inputs, labels=inputs, shift_labels=targets).loss
    torch.testing.assert_close(module.loss(batch), theirs)


@pytest.mark.parametrize("devices", [1, 2])
def test_validation_counts_every_token_once(data, quiet_trainer, devices) -> None:
    module = LanguageModel(GPT2.to_dict())
    strategy = DDPStrategy(start_method="fork") if devices > 1 else "auto"
    trainer = quiet_trainer(devices=devices, strategy=strategy)
    [metrics] = trainer.validate(module, datamodule=data, verbose=False)
    expected = _plain_loss(module.model, data)
    # sums in fp32, in another order: 1e-6; a mean of batch means would be off by over 1e-4
    assert metrics["val/loss"] == pytest.approx(expected, rel=1e-6)
    assert metrics["val/perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    batch_losses = [float(module.loss(batch).detach()) for batch in data.val_dataloader()]
    mean_of_means = sum(batch_losses) / len(batch_losses)
    assert mean_of_means != pytest.approx(expected, rel=1e-4)


def test_sums_of_a_model_in_bf16_do_not_stick(quiet_trainer, tmp_path) -> None:
    """In bf16 a count of targets stops after 256 batches, and the mean goes on growing."""
    corpus = MarkovChain(26, 40 * BLOCK_SIZE, 800 * BLOCK_SIZE)
    data = TokenDataModule(corpus, byte_tokenizer(), str(tmp_path), BLOCK_SIZE, batch_size=2)
    module = LanguageModel(GPT2.to_dict())
    trainer = quiet_trainer(precision="bf16-true")
    for _ in range(2):  # what was cast in the first time is used in the second
        [metrics] = trainer.validate(module, datamodule=data, verbose=False)
        expected = token_loss(module, data.val_dataloader())
        assert metrics["val/loss"] == pytest.approx(expected, rel=1e-4)
    assert next(module.parameters()).dtype == torch.bfloat16


def test_token_loss_is_the_validation_loss(data) -> None:
    module = LanguageModel(GPT2.to_dict())
    found = token_loss(module, data.val_dataloader())
    assert module.training, "left in the mode it had"
    assert found == pytest.approx(_plain_loss(module.model, data), rel=1e-6)


def test_a_checkpoint_is_a_module_that_can_be_evaluated(data, quiet_trainer, tmp_path) -> None:
    optimizer = functools.partial(adamw_cosine, total_steps=2, warmup_steps=0, lr=0.1)
    module = LanguageModel(GPT2.to_dict(), optimizer)
    trainer = quiet_trainer(max_steps=2)
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    loaded = LanguageModel.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    assert loaded.model.config.to_dict() == module.model.config.to_dict()
    assert _plain_loss(loaded.model, data) == _plain_loss(module.model, data)
    with pytest.raises(
        ValueError, match="was created without an optimizer and can only be evaluated"
    ):
        loaded.configure_optimizers()


def test_a_model_of_the_hub_is_found_in_its_cache_and_not_read(monkeypatch, tmp_path) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "abc"
    config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=8)
    GPT2LMHeadModel(config).save_pretrained(snapshot)
    reference = tmp_path / "models--owner--name" / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    module = LanguageModel(config.to_dict(), pretrained="owner/name", on_meta=True)
    assert all(parameter.is_meta for parameter in module.model.parameters())
    assert module.model.training
    with pytest.raises(ValueError, match=r"'owner/other' cannot be read shard by shard: "):
        LanguageModel(config.to_dict(), pretrained="owner/other", on_meta=True)
