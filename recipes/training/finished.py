"""Use the model of a finished run: evaluate it, or generate text."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from recipes.configuration.resolved import load_config
from recipes.data.tokenizer import pretrained_tokenizer
from recipes.data.training_data import TrainingData
from recipes.stages import stage
from recipes.training.evaluation import generate_text, token_loss
from recipes.training.language_model import LanguageModel
from recipes.training.pretrained import context_length, pretrained_config
from recipes.training.report import EXPORT_FOLDER, SUMMARY_FILE
from recipes.training.run import factory
from recipes.training.summary import shown


def evaluate(run_folder: str) -> dict[str, str]:
    """Return the rows of a panel: loss and perplexity on the run's whole validation split.

    Raises:
        FileNotFoundError: the folder is not one of a run, or its run has not ended.
        ValueError: the data cannot be read.
    """
    run = Path(run_folder)
    config, folder = load_config(run), _model_folder(run)
    module, tokenizer = _load(folder)
    data: TrainingData = factory(config["data"])(tokenizer=tokenizer)
    data.prepare_data()
    batches = data.val_dataloader()
    with stage("validating", len(batches)) as advance:
        loss = token_loss(module, batches, advance)
    rows = {
        "model": shown(str(folder)),
        "data": data.describe(),
        "validation loss": f"{loss:.4f} nats per token",
        "perplexity": f"{math.exp(loss):.2f}" if loss < 700 else "inf",
    }
    if (run / SUMMARY_FILE).exists():
        reported = json.loads((run / SUMMARY_FILE).read_text())["validation_loss"]
        rows["reported"] = f"{reported:.4f} nats per token, when the run ended"
    return rows


def generate(run_folder: str, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """Return the prompt and its continuation.

    Args:
        run_folder: of a run, or of an exported model.
        prompt: beginning of the text.
        tokens: limit for new tokens; a shorter limit by the model's context is printed.
        temperature: of the sampling; 0 always takes the most likely token.
        seed: of the sampling.

    Raises:
        FileNotFoundError: the folder has no model.
        ValueError: the prompt leaves no room in the model's context.
    """
    module, tokenizer = _load(_model_folder(Path(run_folder)))
    length = len(tokenizer(prompt, add_special_tokens=False)["input_ids"]) or 1
    context = context_length(module.model.config) or length + tokens
    if length >= context:
        raise ValueError(
            f"The prompt has {length} tokens, but the context of the model is {context}, prompt and"
            " new tokens together. Shorten the prompt."
        )
    if length + tokens > context:
        tokens = context - length
        print(f"The model's context of {context} leaves room for {tokens} tokens.", file=sys.stderr)
    return generate_text(module, tokenizer, prompt, tokens, seed, temperature)


def _model_folder(run: Path) -> Path:
    """Return the exported model of a run; `run` itself if it is one."""
    for folder in (run / EXPORT_FOLDER, run):
        if (folder / "config.json").exists():
            return folder
    raise FileNotFoundError(
        f"'{run}' has no {EXPORT_FOLDER}/config.json. Give the folder of a run that has ended, and"
        " so exported its model. A stopped run resumes by the same command with"
        " hydra.run.dir=... ckpt_path=last."
    )


def _load(folder: Path) -> tuple[LanguageModel, PreTrainedTokenizerBase]:
    disable_progress_bar()  # of transformers, for reading weights
    with stage("loading the model"):
        config = pretrained_config(str(folder))
        module = LanguageModel(config.to_dict(), pretrained=str(folder))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return module.to(device), pretrained_tokenizer(str(folder))
