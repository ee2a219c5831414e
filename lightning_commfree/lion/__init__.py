"""Distributed Lion: an optimizer whose workers vote on the sign of each parameter's step.

"Communication Efficient Distributed Training with Distributed Lion", Liu, Wu, Chen, Liu, Li and
Liu, 2024, arXiv:2404.00438. Workers do not exchange gradients or momentum buffers. For each
parameter, a worker sends one bit, its vote, and receives one bit, the result. Each of n workers
runs::

    for step in 1, 2, ...:
        g = gradient of this worker's own batch
        c = b1 * m + (1 - b1) * g                 # direction, with the old momentum
        ballot = pack(sign(c))                    # 1 bit per parameter; a second if any c is 0
        Delta = sign(sum of all ballots)          # "majority"; with "average", the mean
        m = b2 * m + (1 - b2) * g                 # this worker's own momentum, never sent
        x = x * (1 - eta * lambda) - eta * Delta  # bit-identical on all workers

=========  =======================  =================  ============  ===============================
symbol     name here                unit               default       source
=========  =======================  =================  ============  ===============================
n          `View.size`              workers            all ranks     section 3
g_i, m_i   `grad`, `momentum`       fp32               --            Algorithm 1
c_i        direction                fp32               --            Algorithm 1; vote is sign(c_i)
Delta      `PackedDelta`            -1 to 1            --            equation 4: majority, average
eta        `lr`                     change per step    1e-4          arXiv:2302.06675: 3 to 10 times
                                                                     smaller than AdamW's
lambda     `weight_decay`           --                 0             ibid.: 3 to 10 times larger
b1, b2     `betas`                  --                 (0.9, 0.99)   Algorithm 1
=========  =======================  =================  ============  ===============================

Read in this order:

1. `worker`: one worker's computation (`worker_numba` has its CPU loops, `worker_triton` its GPU
   kernels). `vote`: how ballots are counted.
2. `ballot`: how ballots are exchanged. `buckets`: which parameters share a ballot. `voting`: a full
   step, with overlap of votes and backward.
3. `optimizer`: the `torch.optim.Optimizer`. `algorithm`: runs its votes during a fit, or in a loop
   without a Trainer (`loop`).

Departures from the paper:

- Ties and zeros: sign(0) is exactly 0. The paper counts one bit per parameter; this package sends a
  second bit if there is a zero or a tie. With `ties="random"`, one bit suffices even if n is even.
- A parameter that has no gradient on any worker is neither moved nor decayed, as with any torch
  optimizer. If only some workers have a gradient, the others vote zero and keep their momentum
  buffers.
- Matrices can vote with the signs of c after Newton-Schulz iterations (SignMuon, arXiv:2605.16311).
  This is off by default.
"""

from __future__ import annotations

from lightning_commfree.lion.algorithm import LionVotes, only_lion, refuse_without_momenta
from lightning_commfree.lion.loop import distributed_lion
from lightning_commfree.lion.optimizer import DistributedLion
from lightning_commfree.lion.settings import LionSettings
from lightning_commfree.lion.voting import Voting
from lightning_commfree.lion.worker import mean_momenta

__all__ = [
    "DistributedLion",
    "LionSettings",
    "Voting",
    "LionVotes",
    "distributed_lion",
    "mean_momenta",
    "only_lion",
    "refuse_without_momenta",
]
