"""What the READMEs tell a reader to type works: every command, and every block of Python.

They are found in the pages, so one that is added is tested. `reader.py` says what is done with a
command, and what is not tried.
"""

from __future__ import annotations

import ast
import inspect
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.strategies import DDPStrategy
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import lightning_commfree
from recipes.data.tokenizer import byte_tokenizer
from tests.reader import COPY, ROOT, STOPPED, Reader, commands_of, python_of

PAGES = {page: (ROOT / page).read_text("utf-8") for page in ("README.md", "recipes/README.md")}
COMMANDS = dict.fromkeys(command for text in PAGES.values() for command in commands_of(text))
BLOCKS = [block for text in PAGES.values() for block in python_of(text)]
PUBLIC = {name: getattr(lightning_commfree, name) for name in lightning_commfree.__all__}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """In a folder that looks like the repository's root, with what a reader may have lying there."""
    folder = tmp_path_factory.mktemp("workplace")
    for name in ("conf", "recipes"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "tools").mkdir()
    for tool in ("cat", "ls"):
        (folder / "tools" / tool).symlink_to(f"/bin/{tool}")
    _write_text(folder)
    _write_models(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        reader = Reader(patch)
        reader.type_in(f"python -m recipes.pretrain hydra.run.dir={STOPPED}")
        (folder / STOPPED / "wandb_run_id.txt").write_text("1234abcd\n")
        shutil.copytree(STOPPED, COPY)
        yield reader


def _write_text(folder: Path) -> None:
    lines = [f"{i} green bottles hanging on the wall\n" for i in range(400)]
    (folder / "books").mkdir()
    (folder / "books" / "bottles.txt").write_text("".join(lines))
    (folder / "held_out.txt").write_text("".join(lines[:40]))
    pairs = [(f"{i} + 1 = ", f"{i + 1}") for i in range(60)]
    tasks = [{"prompt": prompt, "response": response} for prompt, response in pairs]
    chats = [
        {"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": r}]}
        for p, r in pairs
    ]
    for name, examples in (("tasks.jsonl", tasks), ("chats.jsonl", chats)):
        (folder / name).write_text("".join(f"{json.dumps(example)}\n" for example in examples))


def _write_models(folder: Path) -> None:
    """Write what `from_pretrained` would else ask the hub for."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (ROOT / "recipes/data/templates/plain.jinja").read_text()
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    common = {"vocab_size": len(tokenizer), "hidden_size": 16, **ends}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2}
    models = {
        "gpt2": GPT2LMHeadModel(GPT2Config(n_positions=512, **common, **heads)),
        "path/to/llama": LlamaForCausalLM(
            LlamaConfig(max_position_embeddings=512, intermediate_size=32, **common, **heads)
        ),
    }
    for path, model in models.items():
        model.save_pretrained(folder / path)
        tokenizer.save_pretrained(folder / path)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.partition("#")[0])
def test_a_command(command: str, reader: Reader) -> None:
    reader.type_in(command)
