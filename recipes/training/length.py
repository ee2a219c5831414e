"""The length of a run: convert a token budget to optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import lightning.pytorch as pl
from hydra.utils import get_class
from lightning.fabric.utilities.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from lightning_commfree import DominoTPStrategy, ElasticDiLoCoStrategy
from recipes.training.layout import inside_of


class Ranks(NamedTuple):
    """The number of processes of a run, as Lightning counts them."""

    per_node: int
    num_nodes: int


def count_ranks(trainer: Mapping[str, Any]) -> Ranks:
    """Count the ranks of a Trainer with these settings, resolving `devices=-1` and "auto".

    Args:
        trainer: with the keys accelerator, devices and num_nodes.
    """
    bare = pl.Trainer(
        accelerator=trainer["accelerator"],
        devices=trainer["devices"],
        num_nodes=trainer["num_nodes"],
        strategy="ddp",  # without it one rank on several nodes would count only itself
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return Ranks(bare.num_devices, bare.num_nodes)


def apply_token_budget(cfg: DictConfig) -> None:
    """Set `trainer.max_steps` from `token_budget`, and print the calculation.

    Must run before interpolations are resolved: optimizer and checkpoints read
    `${trainer.max_steps}`. The run never exceeds the budget and ends less than one step below it.

    Args:
        cfg: composed; changed in place unless `token_budget` is null or missing.

    Raises:
        ValueError: the budget is not a positive whole number, or smaller than one step, or the
            number of replicas may change.
    """
    budget = _budget(cfg)
    if budget is None:
        return
    if issubclass(get_class(cfg.strategy._target_), ElasticDiLoCoStrategy):
        raise ValueError(
            f"token_budget={budget:,} cannot be combined with strategy=elastic_diloco: its replicas"
            " come and go, so nobody knows how many tokens a step takes. Set token_budget=null, and"
            " the length by trainer.max_steps, the same for all replicas."
        )
    shares = _count_shares(cfg)
    rows, block, accumulate = (
        cfg.data.batch_size,
        cfg.data.block_size,
        cfg.trainer.accumulate_grad_batches,
    )
    per_step = shares * rows * block * accumulate
    steps = budget // per_step
    how = (
        f"{per_step:,} tokens a step ({shares} shares of the data x data.batch_size={rows} x"
        f" data.block_size={block} x trainer.accumulate_grad_batches={accumulate})"
    )
    if steps < 1:
        raise ValueError(
            f"token_budget={budget:,} is not enough for one step: this run takes {how}. Raise"
            " the budget, or lower one of these."
        )
    replaced = cfg.trainer.max_steps
    cfg.trainer.max_steps = steps
    rank_zero_only(print)(
        f"token_budget={budget:,}: {steps:,} steps of {how}. The budget decides:"
        f" trainer.max_steps={replaced} is not used."
    )


def _budget(cfg: DictConfig) -> int | None:
    given = cfg.get("token_budget")
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or given != given // 1:
        raise ValueError(
            f"token_budget={given!r} must be a whole number of tokens, such as 2_500_000_000 or"
            " 2.5e9, or null to give the length by trainer.max_steps."
        )
    return int(given)


def _count_shares(cfg: DictConfig) -> int:
    """Return the number of shares of the data; a tensor-parallel group shares one."""
    keys = OmegaConf.masked_copy(cfg.trainer, ["accelerator", "devices", "num_nodes"])
    ranks = count_ranks(cast(dict[str, Any], OmegaConf.to_container(keys)))
    world = ranks.per_node * ranks.num_nodes
    strategy = cfg.strategy
    if issubclass(get_class(strategy._target_), DominoTPStrategy):
        return max(world // (strategy.tensor_parallel_size or ranks.per_node), 1)
    if inside_of(strategy) == "domino":
        return max(world // (strategy.get("replica_size") or strategy.get("node_size")), 1)
    return world
