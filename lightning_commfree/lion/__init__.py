"""Communication Efficient Distributed Training with Distributed Lion.

Liu, Wu, Chen, Liu, Li and Liu, 2024, arXiv:2404.00438. Workers keep gradients and momenta to
themselves and vote on the sign of every parameter's step: one bit up, one bit down. Worker i of n::

    for step in 1, 2, ...:
        g = gradient of this worker's own batch
        c = b1 * m + (1 - b1) * g                 # direction, with the old momentum
        ballot = pack(sign(c))                    # 1 bit a parameter; the second only for zeros
        Delta = sign(sum of all ballots)          # "majority"; or their mean, "average"
        m = b2 * m + (1 - b2) * g                 # this worker's own, never sent
        x = x * (1 - eta * lambda) - eta * Delta  # the same bits on all workers

=========  =======================  =================  ============  ===============================
symbol     name here                unit               default       source
=========  =======================  =================  ============  ===============================
n          `View.size`              workers            the world     section 3
g_i, m_i   `grad`, `momentum`       fp32               --            Algorithm 1
c_i        direction                fp32               --            Algorithm 1; votes by its sign
Delta      `PackedDelta`            -1 to 1            --            equation 4: majority, average
eta        `lr`                     step of a          1e-4          arXiv:2302.06675: 3 to 10 times
                                    parameter                        less than AdamW's
lambda     `weight_decay`           --                 0             the same: 3 to 10 times more
b1, b2     `betas`                  --                 (0.9, 0.99)   Algorithm 1
=========  =======================  =================  ============  ===============================

Read in this order:

1. `worker`: what one worker computes alone. `vote`: how ballots are counted.
2. `ballot`: how they travel. `buckets` and `voting`: when they leave, and a whole step.
3. `optimizer`: all of it as a `torch.optim.Optimizer`. `session`: one optimizer for the length of a
   training.

Departures from the paper:

- Ties and zeros: sign(0) is 0, exactly. The paper speaks of one bit; the second one that this needs
  travels only where there is a zero or a tie. `ties="random"` is one bit for even n too.
- A parameter on which no worker has a gradient stays as it is, without decay, as under any torch
  optimizer. If some have one, the others vote zero and keep their momenta.
- The momenta may be averaged every so many steps (arXiv:2411.16462); off by default.
"""

from __future__ import annotations

from lightning_commfree.lion.optimizer import DistributedLion
from lightning_commfree.lion.session import VotingSession, only_lions, refuse_without_momenta
from lightning_commfree.lion.settings import LionSettings
from lightning_commfree.lion.voting import Voting
from lightning_commfree.lion.worker import mean_momenta

__all__ = [
    "DistributedLion",
    "LionSettings",
    "Voting",
    "VotingSession",
    "mean_momenta",
    "only_lions",
    "refuse_without_momenta",
]
