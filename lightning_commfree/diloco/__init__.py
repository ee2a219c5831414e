"""Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch.

Douillard et al., 2025, arXiv:2501.18512. Replicas train independently. They exchange *outer
gradients*, one fragment of the model at a time, while training continues. Each replica runs::

    global_copy = copy of the initial parameters          # fp32, the same on all M replicas
    for step in 1, 2, ...:
        inner_optimizer.step()                            # on this replica's own batch

        for p in fragments to launch after this step:     # every H steps; see `schedule`
            delta = global_copy[p] - local[p]             # outer gradient: old minus new
            flight[p] = all_gather(encode(delta))         # in the background

        for p in fragments launched tau steps ago:
            global_copy[p].grad = mean(decode(flight[p])) # bit-identical on all replicas
            outer_optimizer.step()
            local[p] = alpha * local[p] + (1 - alpha) * global_copy[p]

    land all in-flight fragments
    local = global_copy = mean of the local copies        # `finish`

======  ==================  ===============  ===============  =================================
symbol  name here           unit             default          source
======  ==================  ===============  ===============  =================================
M       `View.size`         replicas         one per rank     section 2
H       `sync_every`        inner steps      "auto"           `pace`; 30 and 100 in section 3
P       `num_fragments`     fragments        3 blocks each    section 3.1; other layers: 1 more
t_p     `Schedule.offset`   inner steps      floor(p H / P)   section 2.2
tau     `overlap_steps`     inner steps      1                section 3; `docs/tuning.md`
alpha   `mix`               weight of local  0.5              Figure 10
theta   `global_copy`       fp32             --               Algorithm 2
Delta   `outer_gradient()`  old minus new    --               Algorithm 2
--      `wire_dtype`        bits per value   "fp4"            section 2.4; see `codec`
--      `outer_optimizer`   --               SGD, lr 0.4 (or  section 3; `settings`;
                                             0.8), Nesterov   arXiv:2503.09799
                                             momentum 0.9
======  ==================  ===============  ===============  =================================

Read in this order:

1. `schedule`: when fragments launch and land. `pace`: how often, with `sync_every="auto"`.
   `fragments`: how a model is split into them.
2. `codec`: how values are encoded for sending, with the arithmetic in `quantize` and
   `quantize_numba`.
3. `outer`: a fragment's global copy and outer step. `exchange`: the mean over the replicas.
4. `transport`: who takes part in an exchange. `streaming`: the algorithm. `loop`: in a training
   loop without a Trainer.
5. Special cases: `nonfinite` (a replica with NaN), `frozen` (frozen parameters that the user
   unfreezes or hooks modify). `messages`: hints and warnings for the user.

Departures from the paper:

- At the end, a run *finishes*: in-flight fragments land, then every fragment is exchanged once more
  to average the local weights, so that all replicas end with the same weights. The paper evaluates
  the global copies, which are up to H steps stale.
- Section 2.2 and Algorithm 2 disagree on the sign of the offset; this package follows the
  algorithm. The sign affects only the order of the fragments, and only if P >= 3.
- Persistent floating-point buffers (BatchNorm) are averaged with their module's fragment, always in
  fp32; the paper's models have none.
"""

from __future__ import annotations

from lightning_commfree.diloco.codec import CODECS, Codec, Int2Codec
from lightning_commfree.diloco.fragments import Fragment, split_into_fragments
from lightning_commfree.diloco.loop import streaming_diloco
from lightning_commfree.diloco.outer import OuterFragment
from lightning_commfree.diloco.schedule import Schedule
from lightning_commfree.diloco.settings import (
    DiLoCoSettings,
    OuterOptimizerFactory,
    default_outer_optimizer,
)
from lightning_commfree.diloco.streaming import StreamingDiLoCo
from lightning_commfree.diloco.transport import FixedTransport, Transport

__all__ = [
    "CODECS",
    "Codec",
    "DiLoCoSettings",
    "FixedTransport",
    "Fragment",
    "Int2Codec",
    "OuterFragment",
    "OuterOptimizerFactory",
    "Schedule",
    "StreamingDiLoCo",
    "Transport",
    "default_outer_optimizer",
    "split_into_fragments",
    "streaming_diloco",
]
