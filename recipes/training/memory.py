"""Does the model fit? Estimated from its shapes before any of its weights is allocated.

What is counted is what a run holds for certain: weights, gradients, the optimizer, what the
strategy keeps, and what a checkpoint takes for a while. Activations and what travels come on top,
so a run that passes may still run out of memory, and one that is refused cannot work.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]
import torch
from hydra.utils import get_class, instantiate
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from lightning_commfree import DominoTPStrategy, StreamingDiLoCoStrategy
from lightning_commfree.model.blocks import block_names
from recipes.training.forked import without_beginning_cuda
from recipes.training.language_model import LanguageModel
from recipes.training.layout import inside_of
from recipes.training.length import Ranks, count_ranks
from recipes.training.traffic import human_bytes

_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container or a cluster's job; bytes or max


class Need(NamedTuple):
    """Bytes that one rank holds on its device, and what the machine's memory holds besides."""

    weights: int
    gradients: int
    optimizer: int
    strategy: int
    host: int  # of all ranks of a machine and the process that launches them
    saving: int = 0  # while a checkpoint is written: a replica's weights, outer ones in their place

    @property
    def per_rank(self) -> int:
        """Bytes on a rank's device."""
        return self.weights + self.gradients + self.optimizer + self.strategy + self.saving


def check_memory(config: Mapping[str, Any], outline: Callable[[], LanguageModel]) -> None:
    """Refuse a model that is larger than memory, unless `check_memory` is false.

    Args:
        config: resolved, with `check_memory`, `trainer`, `optimizer` and `strategy`.
        outline: makes the module; called under `torch.device("meta")`, where it has shapes only.

    Raises:
        ValueError: it does not fit, with the numbers and what to do.
    """
    if not config["check_memory"]:
        return
    ranks = count_ranks(config["trainer"])
    # or the check would decide what the weights begin with; to ask for CUDA's state is to touch it
    with isolate_rng(include_cuda=False):
        with torch.device("meta"):
            module = outline()
        need = estimate(module, config, ranks)
    on_gpu = config["trainer"]["accelerator"] in ("gpu", "cuda")
    if on_gpu and need.per_rank > (free := free_gpu_bytes(config["trainer"]["devices"])):
        raise ValueError(_sentence(need.per_rank, free, "on each GPU", need, config))
    total = need.host + (0 if on_gpu else ranks.per_node * need.per_rank)
    if total > (free := free_host_bytes()):
        where = f"in the machine's memory for {ranks.per_node} rank(s)"
        raise ValueError(_sentence(total, free, where, need, config))


def estimate(module: LanguageModel, config: Mapping[str, Any], ranks: Ranks) -> Need:
    """Return what a run holds at least.

    Args:
        module: on any device; `meta` will do. Changed: to the run's precision.
        config: resolved, with `trainer`, `optimizer` and `strategy`.
        ranks: of the run.
    """
    strategy = config["strategy"]
    kind, start_method = get_class(strategy["_target_"]), strategy["start_method"]
    built = _num_bytes(module)  # in fp32, on the host
    launching = built if start_method != "popen" else 0
    on_host = launching + (ranks.per_node * built if start_method == "spawn" else 0)
    dtype = _DTYPES.get(str(config["trainer"]["precision"]), torch.float32)
    module.to(dtype)
    trainable = [p for p in module.parameters() if p.requires_grad]
    numel = sum(p.numel() for p in trainable)
    gradients = sum(p.nbytes for p in trainable)
    kept = _bucket_bytes(kind, strategy, ranks, gradients)
    if issubclass(kind, StreamingDiLoCoStrategy):
        outer = 8 * numel // strategy["replica_size"]
        if strategy["outer_device"] == "cpu":
            on_host += ranks.per_node * outer
        else:
            kept += outer
    optimizer = without_beginning_cuda(lambda: _optimizer_bytes(config["optimizer"], dtype, numel))
    aside = gradients if issubclass(kind, StreamingDiLoCoStrategy) else 0  # the trained weights
    need = Need(_num_bytes(module), gradients, optimizer, kept, on_host, aside)
    if issubclass(kind, DominoTPStrategy):
        size = strategy["tensor_parallel_size"] or ranks.per_node
        weights, gradients, optimizer = (part // size for part in need[:3])
        return Need(weights, gradients, optimizer, 0, on_host)
    if inside_of(strategy) == "fsdp":
        return _in_parts(need, module, _group_size(strategy))
    if inside_of(strategy) == "domino":
        size = _group_size(strategy)
        weights, gradients, optimizer = (part // size for part in need[:3])
        return Need(weights, gradients, optimizer, kept, on_host, aside // size)
    return need


def _in_parts(need: Need, module: nn.Module, size: int) -> Need:
    """Return what a rank holds where `size` of them hold parts of the model, by FSDP.

    The largest unit is whole for a while, with its gradients: a block, or what stands in none. A
    save puts one tensor together at a time.
    """
    blocks = [module.get_submodule(name) for name in block_names(module)]
    sizes = [_num_bytes(block) for block in blocks]
    units = [*sizes, need.weights - sum(sizes)]
    return Need(
        need.weights // size + max(units),
        need.gradients // size + max(units),
        need.optimizer // size,
        need.strategy,
        need.host,
        need.saving // size,
    )


def _bucket_bytes(kind: type, strategy: Mapping[str, Any], ranks: Ranks, gradients: int) -> int:
    """Return what DDP's buckets hold, beside the gradients that they are copied from."""
    if issubclass(kind, DominoTPStrategy):
        return 0
    group = _group_size(strategy)
    if kind is DDPStrategy:
        group = ranks.per_node * ranks.num_nodes
    return gradients if group > 1 and inside_of(strategy) == "ddp" else 0


def _group_size(strategy: Mapping[str, Any]) -> int:
    """Return the ranks of a replica or node, 1 where a strategy has none."""
    return int(strategy.get("replica_size") or strategy.get("node_size") or 1)


def free_host_bytes() -> int:
    """Return the bytes of memory that are free on this machine, or that its job may have."""
    free = int(psutil.virtual_memory().available)
    if _CGROUP_LIMIT.exists() and (limit := _CGROUP_LIMIT.read_text().strip()).isdigit():
        return min(free, int(limit))
    return free


def free_gpu_bytes(devices: int | str | list[int]) -> int:
    """Return the bytes that are free on the fullest of the GPUs that a run takes.

    Asked in a process of its own: one that has touched CUDA cannot fork ranks that use it.

    Args:
        devices: as the Trainer takes them: how many, from the first one on, or which; all of them
            with -1 or "auto".
    """
    code = (
        "import json, sys, torch\n"
        "devices = json.loads(sys.argv[1])\n"
        "print(min(torch.cuda.mem_get_info(i)[0] for i in devices))"
    )
    command = [sys.executable, "-c", code, json.dumps(gpus_of(devices))]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def gpus_of(devices: int | str | list[int]) -> list[int]:
    """Return which GPUs the Trainer's `devices` names.

    Raises:
        MisconfigurationException: there are not as many.
    """
    return CUDAAccelerator.parse_devices(-1 if devices == "auto" else devices) or []


def _num_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _optimizer_bytes(optimizer: Mapping[str, Any], dtype: torch.dtype, numel: int) -> int:
    """Return what an optimizer keeps for `numel` parameters, whichever it is.

    Its first step on a small module tells; on `meta` not every optimizer can take one.
    """
    stand_in = nn.Linear(64, 64).to(dtype)
    made = instantiate(optimizer, _partial_=True, _convert_="all")(stand_in)["optimizer"]
    for parameter in stand_in.parameters():
        parameter.grad = torch.zeros_like(parameter)
    made.step()
    kept = [value for state in made.state.values() for value in state.values()]
    kept_bytes = sum(
        value.nbytes for value in kept if isinstance(value, torch.Tensor) and value.ndim
    )
    return kept_bytes * numel // sum(p.numel() for p in stand_in.parameters())


def _sentence(needed: int, free: int, where: str, need: Need, config: Mapping[str, Any]) -> str:
    name = config["strategy"]["_target_"].rsplit(".", 1)[-1]
    parts = {
        "weights": need.weights,
        "gradients": need.gradients,
        "optimizer": need.optimizer,
        name: need.strategy,
        "the copy of a save": need.saving,
    }
    listed = ", ".join(f"{part} {human_bytes(size)}" for part, size in parts.items() if size)
    advice = ["take a smaller `model`", "`trainer.precision=bf16-true`", "fewer `trainer.devices`"]
    if name != DominoTPStrategy.__name__:
        advice.append("`strategy=domino_tp`, which divides the model over the ranks")
    if "inside" in config["strategy"]:
        size = "replica_size" if "replica_size" in config["strategy"] else "node_size"
        advice.append(f"`strategy.inside=fsdp` with `strategy.{size}` ranks that divide the model")
    if name == StreamingDiLoCoStrategy.__name__:
        advice.append("a larger `strategy.replica_size`, or `strategy.outer_device=cpu` for GPUs")
    return (
        f"The model is larger than memory: the run needs at least {human_bytes(needed)} {where}"
        f" (a rank's {listed}; activations come on top), and {human_bytes(free)} are free. What"
        f" helps: {'; '.join(advice)}. `check_memory=false` starts it all the same."
    )
