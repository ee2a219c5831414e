"""Refuse a model that is larger than memory, estimated before any of its weights is allocated.

The estimate is a lower bound: weights, gradients, optimizer, the strategy's state and the copy for
a checkpoint. Activations and communication come on top, so a run that passes may still run out of
memory, but one that is refused cannot work.
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
from lightning_commfree.comm.text import counted, human_bytes
from lightning_commfree.diloco.codec import Codec, codec_of
from lightning_commfree.model.blocks import block_names
from recipes.training.forked import without_initializing_cuda
from recipes.training.language_model import LanguageModel
from recipes.training.layout import inside_of
from recipes.training.length import Ranks, count_ranks

_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container or cluster job: bytes, or "max"


class Need(NamedTuple):
    """Bytes that one rank needs on its device, and bytes that all of a machine need on the host."""

    weights: int
    gradients: int
    optimizer: int
    strategy: int
    host: int  # of all ranks of a machine and their launching process
    saving: int = 0  # during a save: the replica's own weights, while the model has the outer ones

    @property
    def per_rank(self) -> int:
        """Bytes on the device of a rank."""
        return self.weights + self.gradients + self.optimizer + self.strategy + self.saving


def check_memory(config: Mapping[str, Any], outline: Callable[[], LanguageModel]) -> None:
    """Refuse a model that is larger than memory, unless `check_memory` is false.

    Args:
        config: resolved, with `check_memory`, `trainer`, `optimizer` and `strategy`.
        outline: creates the module; called under `torch.device("meta")`, which allocates nothing.

    Raises:
        ValueError: it does not fit; with the figures and what to do.
    """
    if not config["check_memory"]:
        return
    ranks = count_ranks(config["trainer"])
    # keeps the random state for the real weights; reading CUDA's would initialize CUDA
    with isolate_rng(include_cuda=False):
        with torch.device("meta"):
            module = outline()
        need = estimate(module, config, ranks)
    on_gpu = config["trainer"]["accelerator"] in ("gpu", "cuda")
    if on_gpu and need.per_rank > (free := free_gpu_bytes(config["trainer"]["devices"])):
        raise ValueError(_sentence(need.per_rank, free, "on each GPU", need, config))
    total = need.host + (0 if on_gpu else ranks.per_node * need.per_rank)
    if total > (free := free_host_bytes()):
        where = f"in the machine's memory for {counted(ranks.per_node, 'rank')}"
        raise ValueError(_sentence(total, free, where, need, config))


def estimate(module: LanguageModel, config: Mapping[str, Any], ranks: Ranks) -> Need:
    """Estimate the memory that a run needs at least.

    Args:
        module: on any device, usually `meta`. Changed to the run's precision.
        config: resolved, with `trainer`, `optimizer` and `strategy`.
        ranks: of the run.
    """
    strategy = config["strategy"]
    kind, inside = get_class(strategy["_target_"]), inside_of(strategy)
    is_diloco = issubclass(kind, StreamingDiLoCoStrategy)
    is_tensor_parallel = issubclass(kind, DominoTPStrategy)
    built = _num_bytes(module)  # in fp32, on the host
    # the launching process builds the model; spawned ranks get copies, forked ones share it
    copies = {"popen": 0, "spawn": 1 + ranks.per_node}.get(strategy["start_method"], 1)
    host = copies * built
    dtype = _DTYPES.get(str(config["trainer"]["precision"]), torch.float32)
    module.to(dtype)
    trained = [p for p in module.parameters() if p.requires_grad]
    numel, gradients = sum(p.numel() for p in trained), sum(p.nbytes for p in trained)
    optimizer = without_initializing_cuda(
        lambda: _optimizer_bytes(config["optimizer"], dtype, numel)
    )
    group = int(strategy.get("replica_size") or strategy.get("node_size") or 1)
    kept = 0
    if inside == "ddp" and not is_tensor_parallel:
        synced = ranks.per_node * ranks.num_nodes if kind is DDPStrategy else group
        kept += gradients if synced > 1 else 0  # DDP's buckets, copies of the gradients
    if is_diloco:
        outer = 8 * numel // group  # global copy and outer momentum
        if _codec(strategy["wire_dtype"]).error_feedback:
            kept += 4 * numel // group  # what the wire has lost, always on the device
        if strategy["outer_device"] == "cpu":
            host += ranks.per_node * outer
        else:
            kept += outer
    shards, gathered = 1 if inside == "ddp" else group, 0
    if is_tensor_parallel:
        shards = strategy["tensor_parallel_size"] or ranks.per_node
    elif inside == "fsdp":
        # the largest unit is gathered temporarily: a block, or all parameters outside of blocks
        blocks = [_num_bytes(module.get_submodule(name)) for name in block_names(module)]
        gathered = max(*blocks, _num_bytes(module) - sum(blocks), 0)
    return Need(
        _num_bytes(module) // shards + gathered,
        gradients // shards + gathered,
        optimizer // shards,
        kept,
        host,
        gradients // shards if is_diloco else 0,
    )


def free_host_bytes() -> int:
    """Return the free memory of this machine in bytes, within the limit of its cgroup."""
    free = int(psutil.virtual_memory().available)
    if _CGROUP_LIMIT.exists() and (limit := _CGROUP_LIMIT.read_text().strip()).isdigit():
        return min(free, int(limit))
    return free


def free_gpu_bytes(devices: int | str | list[int]) -> int:
    """Return the free bytes on the fullest of the Trainer's GPUs.

    A process of its own reads them: one that has initialized CUDA cannot fork ranks that use it.

    Args:
        devices: as for the Trainer: a number, indices, or -1 or "auto" for all.
    """
    code = (
        "import json, sys, torch\n"
        "devices = json.loads(sys.argv[1])\n"
        "print(min(torch.cuda.mem_get_info(i)[0] for i in devices))"
    )
    command = [sys.executable, "-c", code, json.dumps(gpus_of(devices))]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def gpus_of(devices: int | str | list[int]) -> list[int]:
    """Return the indices of the Trainer's GPUs.

    Raises:
        MisconfigurationException: there are too few.
    """
    return CUDAAccelerator.parse_devices(-1 if devices == "auto" else devices) or []


def _num_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _optimizer_bytes(optimizer: Mapping[str, Any], dtype: torch.dtype, numel: int) -> int:
    """Return the size of an optimizer's state for `numel` parameters.

    Measured after a step on a small module, because not every optimizer can step on `meta`.
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


def _codec(wire_dtype: str | Mapping[str, Any]) -> Codec:
    return codec_of(wire_dtype if isinstance(wire_dtype, str) else instantiate(wire_dtype))


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
        advice.append("`strategy=domino_tp`, which shards the model over the ranks")
    if "inside" in config["strategy"]:
        size = "replica_size" if "replica_size" in config["strategy"] else "node_size"
        advice.append(f"`strategy.inside=fsdp` with `strategy.{size}` ranks that shard the model")
    if name == StreamingDiLoCoStrategy.__name__:
        advice.append("a larger `strategy.replica_size`, or `strategy.outer_device=cpu` for GPUs")
    return (
        f"The model is larger than memory: the run needs at least {human_bytes(needed)} {where}"
        f" (per rank {listed}; activations come on top), but only {human_bytes(free)} are free."
        f" Options: {'; '.join(advice)}. `check_memory=false` starts the run anyway."
    )
