"""Domino: Eliminating Communication in LLM Training via Generic Tensor Slicing and Overlapping.

Wang, Zhang, Shen, Li and Ruwase, 2024, arXiv:2409.15241. Tensor parallelism whose all-reduces fly
while another part of the batch computes.

=========  ============================  ==================  ===========  ==========================
symbol     name here                     unit                default      source
=========  ============================  ==================  ===========  ==========================
t          `tensor_parallel_size`        ranks               a node's     section 2
X1, X2     `split="batch"`               rows of the batch   2 parts      section 3: row split of X
B1, B2     `split="weight"`              outputs of a row    --           section 3: column split of
                                         linear                           B
X, B       `split="hybrid"`              both                --           section 3: both
--         `split="token"`               tokens              --           not in the paper: for a
                                                                          batch of one
--         `split="auto"`                --                  its choice   not in the paper: the
                                                                          fastest, by measuring
--         `num_micro_batches`           parts               2            section 3
A, M       `Sublayer`                    sublayers           2 a layer    attention, MLP
=========  ============================  ==================  ===========  ==========================

Read in this order: `layers` (the sharded modules), `sublayers` (what lies between two all-reduces),
`micro_sublayer` (one of them, for one part of a batch), `splits` and `choose_split` (how a batch is
split), `auto_split` (which split is fastest), `schedule` (who computes while whose sum flies),
`shard_spec` and `sharding` (how a transformers model is divided), `families` (what each
architecture says of itself), `plan` and `plan_layers` (one that has a plan in its config),
`adapters` (LoRA beside divided linears), `materialize` (one that has no values yet), `loss` (cross
entropy without whole logits), `finite` (NaN and Inf end a fit), `forecast` (what a step sends),
`parallel` (all of it put into the model), `sharded_module` (what others ask of a divided model).

Departures from the paper:

- Forward is wider: a sum is landed right before its consumer, so it flies behind a whole sublayer
  of the other micro-batch. The released code lands it earlier.
- Backward is not autograd's mirror of forward. Each sublayer of each micro-batch has graphs of its
  own, and they run in the order in which sums fly longest, without private hooks of torch
  (`schedule`).
- Query, key and value share one all-reduce in backward, and so do gate and up.
"""

from __future__ import annotations

from lightning_commfree.domino.data_parallel import GradientMean
from lightning_commfree.domino.families import FAMILIES
from lightning_commfree.domino.gradients import (
    GradientAverage,
    gradient_norm,
    looks_finite,
    refuse_nonfinite,
    refuse_nonfinite_weights,
    sum_shared,
)
from lightning_commfree.domino.layers import TensorGroup
from lightning_commfree.domino.parallel import ParallelModel, check_divisible
from lightning_commfree.domino.settings import DominoSettings
from lightning_commfree.domino.sharded_module import (
    HeldTensor,
    OptimizerParts,
    ShardedModule,
    check_batch,
    check_module,
    check_states,
    find_models,
    refuse_meta,
)
from lightning_commfree.domino.sharding import ShardSpec, whole_tensor
from lightning_commfree.model.meta_init import on_meta

__all__ = [
    "FAMILIES",
    "DominoSettings",
    "GradientAverage",
    "GradientMean",
    "HeldTensor",
    "OptimizerParts",
    "ParallelModel",
    "ShardSpec",
    "ShardedModule",
    "TensorGroup",
    "check_divisible",
    "check_batch",
    "check_module",
    "check_states",
    "find_models",
    "gradient_norm",
    "looks_finite",
    "on_meta",
    "refuse_meta",
    "refuse_nonfinite",
    "refuse_nonfinite_weights",
    "sum_shared",
    "whole_tensor",
]
