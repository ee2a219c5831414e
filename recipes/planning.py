"""Print and draw a plan: the output of `recipes.plan` for a model of transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from commfree_planner import (
    Choice,
    Method,
    Model,
    Training,
    advise,
    choose,
    inside_line,
    log_grid,
    methods,
)
from commfree_planner.advice import plain
from commfree_planner.choice import alternatives
from lightning_commfree.comm.text import counted, human_bytes
from lightning_commfree.diloco import CODECS
from recipes.training.language_model import LanguageModel, built_from_config

Config = dict[str, Any]
Curves = dict[str, list[float]]

FIGURE = "plan.png"
_DEVICE_GB = (24, 40, 80)  # of common GPUs
_TRAINING_KEYS = (
    "num_replicas",
    "num_fragments",
    "wire_dtype",
    "gradient_dtype",
    "tokens_per_step",
    "loss",
    "bbr",
)


def plan(config: Config, console: Console) -> Choice:
    """Print the table and the advice, and write the figure.

    Args:
        config: `conf/plan.yaml` with its model, composed and resolved.
        console: where to print.

    Returns:
        The recommended strategy, as printed.

    Raises:
        ValueError: a value is out of range, or the model has no list of blocks.
    """
    model = model_from_config(config["model"], config["vocab_size"])
    given = {key: config[key] for key in _TRAINING_KEYS}
    fixed = {key: config[key] for key in ("sync_every", "overlap_steps") if config[key] is not None}
    times = {"latency_s": config["latency"], "sync_seconds": config["sync_time"]}
    training = Training(model, config["step_time"], **times, **given, **fixed)
    gbit_per_s = config["bandwidth"]
    compared = methods(training)
    advice = advise(training, gbit_per_s, config["advice_target"], fixed)
    choice = choose(training, gbit_per_s, config["advice_target"], advice)
    console.print(Text(_header(training, config)))
    console.print(utilization_table(training, compared, gbit_per_s))
    console.print(bandwidth_table(training, compared, config["targets"]))
    console.print(bytes_table(compared, config["replica_size"]))
    console.print(Text(memory_line(model, config["replica_size"], config["wire_dtype"])))
    if config["replica_size"] > 1:
        console.print(Text(inside_line(training, config["replica_size"])))
    console.print(Text("\n".join(choice_lines(choice))))
    others = alternatives(training, gbit_per_s, config["advice_target"], choice, advice)
    console.print(Text("\n".join(others)))
    path = Path(config["run_dir"]) / FIGURE
    draw_training(training, compared, gbit_per_s, path)
    console.print(Text(f"figure: {path}"), soft_wrap=True)
    return choice


def memory_line(model: Model, replica_size: int, wire_dtype: str = "fp4") -> str:
    """Return the memory of a rank with `inside=ddp` and `fsdp`, and the size that requires fsdp.

    Args:
        model: trained in fp32 by AdamW under DiLoCo; activations are extra.
        replica_size: ranks of a replica; for 1 the second figure assumes 8.
        wire_dtype: of the outer gradients; error feedback takes 4 bytes per parameter.
    """
    ranks = replica_size if replica_size > 1 else 8
    outer = 12 if CODECS[wire_dtype].error_feedback else 8  # global copy, momentum, residual
    # weights, gradients, AdamW's two moments, outer tensors, DDP's buckets
    whole = 4 + 4 + 8 + outer / replica_size + (4 if replica_size > 1 else 0)
    unit = max(*model.block_params, model.rest_params)  # gathered temporarily, with its gradients
    parts = ((16 + outer) * model.params / ranks) + 8 * unit
    limits = ", ".join(plain(size / whole, 2) for size in _DEVICE_GB)
    sizes = ", ".join(map(str, _DEVICE_GB))
    return (
        f"A rank holds {human_bytes(round(whole * model.params))} with `inside=ddp` and"
        f" replica_size={replica_size}, {human_bytes(round(parts))} with `inside=fsdp` and"
        f" replica_size={ranks} (fp32, AdamW, DiLoCo's outer state; activations on top). With GPUs"
        f" of {sizes} GB a replica needs fsdp from {limits} billion parameters on."
    )


def model_from_config(config: Config, vocab_size: int | None) -> Model:
    """Return the sizes of the blocks of a model in `conf/model/`.

    Built as by `recipes.pretrain`, but without allocating weights.

    Args:
        config: a transformers config with its `_target_`.
        vocab_size: number of tokens; None takes the config class's default.

    Raises:
        ValueError: the model has no list of as many blocks as its config has hidden layers.
    """
    vocabulary = {} if vocab_size is None else {"vocab_size": vocab_size}
    model_config = built_from_config(lambda: instantiate(config, **vocabulary, _convert_="all"))
    with torch.device("meta"):  # counts parameters without allocating them
        module = LanguageModel(model_config.to_dict())
    count = model_config.num_hidden_layers
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists:
        raise ValueError(
            f"{type(module.model).__name__} has no list of {count} blocks, its config's"
            " `num_hidden_layers`, so the planner cannot form fragments. Plan for a"
            " decoder of transformers like GPT-2 or Llama."
        )
    blocks = [_trainable(block) for block in lists[0]]
    return Model(tuple(blocks), _trainable(module) - sum(blocks), model_config.hidden_size)


def utilization_table(training: Training, compared: Sequence[Method], gbit_per_s: float) -> Table:
    """Return a table with the utilization of each method at the given bandwidth."""
    table = Table("method", "setting", title=f"At {gbit_per_s:g} Gbit/s")
    for column in ("utilization", "seconds per step"):
        table.add_column(column, justify="right")
    for name, setting, exchange in compared:
        reached = training.utilization(exchange, gbit_per_s)
        step_time = training.step_seconds / reached
        table.add_row(name, setting, f"{reached:.1%}", plain(step_time, 4))
    return table


def bandwidth_table(
    training: Training, compared: Sequence[Method], targets: Sequence[float]
) -> Table:
    """Return a table with the bandwidth that each method needs for each utilization."""
    table = Table("method", title="Gbit/s needed for a utilization of")
    for target in targets:
        table.add_column(f"{target:.0%}", justify="right")
    for name, _, exchange in compared:
        needed = (training.needed_gbit_per_s(exchange, target) for target in targets)
        cells = ("never" if math.isinf(gbit) else plain(gbit) for gbit in needed)
        table.add_row(name, *cells)
    return table


def bytes_table(compared: Sequence[Method], replica_size: int) -> Table:
    """Return a table with the bytes that each method sends."""
    table = Table("method", title="Bytes sent")
    for column in ("per step, by a replica", "by each of its ranks", "at once", "data parallel's"):
        table.add_column(column, justify="right")
    most = compared[0].exchange.bytes_per_step
    for name, _, exchange in compared:
        sent = exchange.bytes_per_step
        table.add_row(
            name,
            human_bytes(sent),
            human_bytes(sent / replica_size),
            human_bytes(exchange.bytes_at_once),
            f"{'' if sent > most else '1/'}{max(most / sent, sent / most):,.4g}"
            if sent
            else "none",
        )
    return table


def choice_lines(choice: Choice) -> list[str]:
    """Return the recommended strategy and the reasons, as lines of text."""
    setting = f" ({choice.setting})" if choice.setting else ""
    return [
        f"Use strategy={choice.strategy}{setting}: {choice.utilization:.1%}.",
        *(f"- {reason}" for reason in choice.reasons),
        "",
    ]


def draw_training(
    training: Training, compared: Sequence[Method], gbit_per_s: float, path: Path
) -> None:
    """Write a PNG with the utilization of each method, three decades around the bandwidth."""
    finite = gbit_per_s if math.isfinite(gbit_per_s) else 1e3
    bandwidths = log_grid(finite * 1e-3, finite * 1e3, 181)
    curves = {m.name: [training.utilization(m.exchange, b) for b in bandwidths] for m in compared}
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot, which keeps global state and may look for a display
    axes = figure.subplots()
    draw_curves(axes, bandwidths, curves)
    axes.axvline(finite, color="0.7", zorder=0)
    axes.set_title(
        f"{training.model.params / 1e6:,.1f} M parameters, {training.step_seconds:g} s per step"
    )
    axes.legend()
    figure.savefig(path, dpi=120)


def draw_curves(axes: Any, bandwidths: Sequence[float], curves: Curves) -> None:
    """Draw utilizations over bandwidths (Gbit/s) into matplotlib's axes."""
    for name, utilizations in curves.items():
        # blocking fragments take as long as the whole model at once: two identical curves
        look = {"ls": "--", "lw": 2.5, "zorder": 3} if name == "DiLoCo" else {}
        axes.semilogx(bandwidths, utilizations, label=name, **look)
    axes.set(xlabel="bandwidth of a replica (Gbit/s)", ylabel="utilization", ylim=(0, 1.02))


def _trainable(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _header(training: Training, config: Config) -> str:
    model = training.model
    name = config["model"]["_target_"].rpartition(".")[2].removesuffix("Config")
    return (
        f"{name}, {model.params:,} parameters: {len(model.block_params)} blocks of"
        f" {max(model.block_params):,} and {model.rest_params:,} besides.\n"
        f"{counted(training.num_replicas, 'replica')} of {counted(config['replica_size'], 'rank')},"
        f" {training.step_seconds:g} s per step without waiting, sync_every={training.sync_every}."
    )
