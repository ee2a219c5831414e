"""Domino: Eliminating Communication in LLM Training via Generic Tensor Slicing and Overlapping.

Wang, Zhang, Shen, Li and Ruwase, 2024, arXiv:2409.15241. Tensor parallelism in which all-reduces
overlap with computation on another part of the batch.

=========  ============================  ==================  ===========  ==========================
symbol     name here                     unit                default      source
=========  ============================  ==================  ===========  ==========================
t          `tensor_parallel_size`        ranks               one node     section 2
X1, X2     `split="batch"`               rows of the batch   --           section 3: row split of X
B1, B2     `split="weight"`              outputs of a        --           section 3: column split of
                                         row-parallel layer               B
X, B       `split="hybrid"`              both                --           section 3: both
--         `split="token"`               tokens              --           not in the paper: for
                                                                          batches of one row
--         `split="auto"`                --                  default      not in the paper: picks
                                                                          the fastest by timing
--         `num_micro_batches`           micro-batches       2            section 3
A, M       `Sublayer`                    sublayers           2 per layer  attention, MLP
=========  ============================  ==================  ===========  ==========================

Read the algorithm first: `layers` (the sharded modules), `sublayers` (the computation between two
all-reduces), `splits` (how a batch is split), `schedule` (order of computation and all-reduces),
`auto_split` (choice of the fastest split).

Then read how a model is prepared: `sharding` (one tensor, one layer, LoRA adapters), `families`
(the scheduled architectures), `plan` (other models, sharded by the plan in their config), `loss`
(cross entropy without full logits), `parallel` (all of these applied to one model).

Finally, read the interface for strategies: `sharded_module` (states, batches, clipping),
`gradients` (mean, norm, NaN), `data_parallel` (data parallelism across tensor groups), `forecast`
(bytes per step), `settings`.

Departures from the paper:

- The forward pass overlaps more: it waits for a sum only right before using it, so the all-reduce
  overlaps with an entire sublayer of the other micro-batch. The authors' code waits earlier.
- The backward pass does not run in autograd's order. Each sublayer of each micro-batch has its own
  autograd graphs, and the schedule runs them in the order that leaves each all-reduce the most
  time. The gradients of all weights of a sublayer, its row linear's included, are computed after
  the all-reduce of dx has been launched; the authors' code does so for one column linear.
- The query, key and value projections share one all-reduce in backward, and so do the gate and up
  projections.
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
from lightning_commfree.domino.parallel import ParallelModel
from lightning_commfree.domino.settings import DominoSettings
from lightning_commfree.domino.sharded_module import (
    OptimizerShards,
    ShardedModule,
    check_module,
    check_states,
    find_models,
)
from lightning_commfree.domino.sharding import ShardSpec, gather_full_tensor

__all__ = [
    "FAMILIES",
    "DominoSettings",
    "GradientAverage",
    "GradientMean",
    "OptimizerShards",
    "ParallelModel",
    "ShardSpec",
    "ShardedModule",
    "TensorGroup",
    "check_module",
    "check_states",
    "find_models",
    "gather_full_tensor",
    "gradient_norm",
    "looks_finite",
    "refuse_nonfinite",
    "refuse_nonfinite_weights",
    "sum_shared",
]
