"""Train small transformers models with Domino and compare them with a plain Trainer.

`python -m benchmarks.architectures` trains a model of each architecture for three steps, in a plain
Trainer and with `DominoTPStrategy` on two ranks, in float64 and with padded rows.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common.page import provenance, result_page, write_page
from lightning_commfree import DominoTPStrategy
from lightning_commfree.domino import FAMILIES

PAGE = Path(__file__).with_name("result.md")
TITLE = "Which architectures does Domino support?"
RANKS, STEPS, ROWS, TOKENS, WORDS = 2, 3, 3, 12, 96
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
OWN: dict[str, dict[str, Any]] = {  # other names for the same sizes, and what small models need
    "GPT2": {**GPT2, "vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 1},
    "Bloom": {"vocab_size": WORDS, "hidden_size": 16, "n_layer": 2, "n_head": 4},
    "Falcon": {
        "vocab_size": WORDS,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "OPT": {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "Mixtral": EXPERTS,
    "Qwen3Moe": EXPERTS,
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 8},
    "Gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 4},
    "Gemma3": {"sliding_window": 4, "query_pre_attn_scalar": 4},
    "Mistral": {"sliding_window": 4},
}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
ARCHITECTURES = (
    *("GPT2", "Llama", "Mistral", "Qwen2", "Qwen3"),
    *("Gemma", "Gemma2", "Gemma3", "Glm", "Glm4", "GPTNeoX", "Granite", "Cohere", "Helium"),
    *("Mixtral", "Olmo", "Olmo2", "Phi", "Phi3", "Qwen2Moe", "Qwen3Moe", "SmolLM3", "Starcoder2"),
    *("StableLm", "OPT", "Bloom", "Falcon"),
)
LORA = ("GPT2", "Llama", "Qwen3")
HOW_TO_READ = f"""\
Models with 2 blocks of width 16 are trained for {STEPS} steps of SGD on batches of {ROWS} x
{TOKENS} tokens, the first row of which ends with three padding tokens, in float64
(`precision="64-true"`). *Loss* and *weights* are the largest differences from a plain Trainer: over
all steps, and over all weights after the last step. transformers computes norms, softmax and the
loss in float32 whatever the dtype of the model; there, a different summation order changes the
result by about 1e-7. *Held* is the share of the weights that rank 0 holds."""


class Row(NamedTuple):
    """Result for one architecture."""

    name: str
    how: str
    loss: float = 0.0
    weights: float = 0.0
    held: float = 0.0


class Module(pl.LightningModule):
    """Train a model and record the loss of every step."""

    model: Any
    losses: Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("losses", torch.zeros(STEPS, dtype=torch.float64))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return transformers' own loss."""
        words, mask = batch
        labels = words.masked_fill(mask == 0, -100)
        loss: Tensor = self.model(input_ids=words, attention_mask=mask, labels=labels).loss
        self.losses[batch_idx] = loss.detach()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Create SGD for the trainable parameters."""
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1)


class WriteShare(pl.Callback):
    """Write the share of the weights on rank 0 to a file, because ranks are processes."""

    def __init__(self, path: Path, whole: int) -> None:
        self._path, self._whole = path, whole

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the share."""
        if trainer.is_global_zero:
            held = sum(p.numel() for p in pl_module.parameters())
            self._path.write_text(str(held / self._whole))


def make(name: str, lora: bool = False) -> nn.Module:
    """Return a small float64 model with weights large enough for differences to show."""
    config_class = getattr(transformers, CONFIGS.get(name, f"{name}Config"))
    own = OWN.get(name, {})
    settings = own if name in ("GPT2", "Bloom", "Falcon") else {**SIZES, **own}
    config = config_class(**settings)
    config._experts_implementation = "eager"  # grouped matrix products do not support float64
    torch.manual_seed(0)
    model: Any = getattr(
        transformers, f"{name}ForCausalLM" if name != "GPT2" else "GPT2LMHeadModel"
    )(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.double()


def fit(model: nn.Module, strategy: Any, devices: int, folder: Path) -> tuple[Module, float]:
    """Train a model; return its module and the share of the weights on rank 0."""
    words = torch.randint(
        2, WORDS, (STEPS * ROWS, TOKENS), generator=torch.Generator().manual_seed(1)
    )
    mask = torch.ones_like(words)
    mask[::ROWS, -3:] = 0
    path, module = folder / "held", Module(model)
    whole = sum(p.numel() for p in module.parameters())
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=devices,
        use_distributed_sampler=False,  # all ranks get the same batches as the plain Trainer
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=STEPS,
        precision="64-true",
        callbacks=[WriteShare(path, whole)],
    )
    trainer.fit(module, DataLoader(TensorDataset(words, mask), batch_size=ROWS))
    return module, float(path.read_text())


def measure(name: str, lora: bool, folder: Path) -> Row:
    """Train one architecture both ways and compare."""
    title = f"{name} with LoRA" if lora else name
    model = make(name, lora)
    plain, _ = fit(copy.deepcopy(model), "auto", 1, folder)
    strategy = DominoTPStrategy(RANKS, split="batch", start_method="fork")
    scheduled = type(model).__name__ in FAMILIES or lora
    try:
        ours, held = fit(model, strategy, RANKS, folder)
    except ValueError as error:
        return Row(title, f"refused: {str(error).split('. ')[0]}")
    how = "scheduled" if scheduled else "by its plan"
    expected, begun = plain.model.state_dict(), make(name, lora).state_dict()
    assert largest_difference(expected, begun) > 1e-5, "three steps of SGD must change the weights"
    loss = float((ours.losses - plain.losses).abs().max())
    return Row(title, how, loss, largest_difference(ours.model.state_dict(), expected), held)


def largest_difference(state: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference between the floating-point tensors of two states."""
    return max(
        float((value - other[key]).abs().max())
        for key, value in state.items()
        if value.is_floating_point()
    )


def opening(rows: Sequence[Row]) -> list[str]:
    """Return the question and the finding, for the top of the page."""
    done = [row for row in rows if not row.how.startswith("refused")]
    worst = max(done, key=lambda row: row.weights)
    counts = {how: sum(row.how == how for row in rows) for how in ("scheduled", "by its plan")}
    return [
        "Domino overlaps communication for some transformers architectures, shards others by the"
        " tensor-parallel plan in their config, and refuses the rest. Which are they, and do they"
        " train the same?",
        "",
        f"- **Found:** {counts['scheduled']} scheduled, {counts['by its plan']} sharded by a plan,"
        f" {len(rows) - len(done)} refused. Weights differ from a plain Trainer's by"
        f" {worst.weights:.1e} at most ({worst.name}).",
    ]


def page_lines(rows: Sequence[Row]) -> list[str]:
    """Return the page below the provenance."""
    lines = ["| architecture | how | loss | weights | held |", "|---|---|---|---|---|"]
    for row in rows:
        refused = row.how.startswith("refused")
        figures = "| | |" if refused else f"{row.loss:.0e} | {row.weights:.0e} | {row.held:.2f} |"
        lines.append(f"| {row.name} | {row.how} | {figures}")
    return ["## The architectures", "", *HOW_TO_READ.splitlines(), "", *lines]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train all architectures and write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.architectures", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--only", nargs="+", default=list(ARCHITECTURES), choices=ARCHITECTURES)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    block = provenance("architectures", arguments, options.page)
    warnings.simplefilter("ignore")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            for lora in (False, True) if name in LORA else (False,):
                rows.append(measure(name, lora, Path(folder)))
                print(*rows[-1], flush=True)
    write_page(options.page, result_page(TITLE, opening(rows), [block], page_lines(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
