"""Communication Efficient Distributed Training with Distributed Lion.

Liu, Wu, Chen, Liu, Li and Liu, 2024, arXiv:2404.00438. Workers keep gradients and momenta to
themselves and vote on the sign of every parameter's step: one bit up, one bit down.

=========  =======================  =================  ============  ===============================
symbol     name here                unit               default       source
=========  =======================  =================  ============  ===============================
n          `Channel.size`           workers            the world     section 3
g_i, m_i   `grad`, `momentum`       fp32               --            Algorithm 1
c_i        direction                fp32               --            Algorithm 1; votes by its sign
Delta      `PackedDelta`            -1 to 1            --            equation 4: majority, average
eta        `lr`                     step of a          1e-4          arXiv:2302.06675: 3 to 10 times
                                    parameter                        less than AdamW's
lambda     `weight_decay`           --                 0             the same: 3 to 10 times more
b1, b2     `betas`                  --                 (0.9, 0.99)   Algorithm 1
=========  =======================  =================  ============  ===============================

Read in this order: `worker` (the three formulas), `vote` (what becomes of the votes), `ballot` and
`ballot_exchange` (how they travel), `buckets`, `bucket_vote` and `voting` (when they leave and
land), `optimizer` (all of it as a `torch.optim.Optimizer`), `agreement` (what workers must have
alike before), `momenta` (their mean) and `vote_statistics` (figures for a log).

Departures from the paper:

- Ties and zeros: sign(0) is 0, exactly. The paper speaks of one bit; the second one that this needs
  travels only where there is a zero or a tie. `ties="random"` is one bit at even n too.
- A parameter on which no worker has a gradient stays as it is, without decay, as under any torch
  optimizer. If some have one, the others vote zero and keep their momenta.
- The last step's momenta may be averaged every so many steps (arXiv:2411.16462); off by default.
"""

from __future__ import annotations

from lightning_commfree.lion.optimizer import DistributedLion
from lightning_commfree.lion.session import VotingSession, only_lion, refuse_without_momenta
from lightning_commfree.lion.settings import LionSettings
from lightning_commfree.lion.voting import Voting
from lightning_commfree.lion.worker import mean_momenta

__all__ = [
    "DistributedLion",
    "VotingSession",
    "LionSettings",
    "Voting",
    "mean_momenta",
    "only_lion",
    "refuse_without_momenta",
]
