"""Domino: Eliminating Communication in LLM Training via Generic Tensor Slicing and Overlapping.

Wang, Zhang, Shen, Li and Ruwase, 2024, arXiv:2409.15241. Tensor parallelism whose all-reduces are
in flight while another part of the batch computes.

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
--         `split="auto"`                --                  the choice   not in the paper: the
                                                                          fastest, by timing
--         `num_micro_batches`           parts               2            section 3
A, M       `Sublayer`                    sublayers           2 a layer    attention, MLP
=========  ============================  ==================  ===========  ==========================

Read the algorithm first: `layers` (the sharded modules), `sublayers` (the computation between two
all-reduces), `splits` (how a batch is split), `schedule` (which micro-batch computes while whose
all-reduce is in flight), `auto_split` (which split is the fastest).

Then how a model gets there: `sharding` (one layer, one tensor, LoRA), `families` (the scheduled
architectures), `plan` (other models, by the plan in their config), `loss` (cross entropy without
full logits), `parallel` (all of it put into a model).

Then the view from outside: `sharded_module` (states, batches, clipping), `gradients` (mean, norm,
NaN), `data_parallel` (groups as replicas), `forecast` (bytes of a step), `settings`.

Departures from the paper:

- Forward has wider windows: a sum is awaited right before its consumer, so its all-reduce overlaps
  with a whole sublayer of the other micro-batch. The released code waits earlier.
- Backward is not autograd's mirror of forward. Each sublayer of each micro-batch has graphs of its
  own, which run in the order that leaves all-reduces the most time, without private hooks of torch.
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
