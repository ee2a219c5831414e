"""Predict the utilization of a training run from its bandwidth, before training.

This is the simulation of arXiv:2501.18512 (section 3.1, Table 4): a step is a graph of forward,
activation gradient, parameter gradient and exchange for each layer. *Utilization* is compute time
over step time, which includes waiting. It uses only the standard library.

======  ==================  =============  ========================================================
symbol  name here           unit           meaning
======  ==================  =============  ========================================================
--      `step_seconds`      seconds        an inner step without waiting
--      `gbit_per_s`        10^9 bit/s     bandwidth of a replica, all its ranks together, in each
                                           direction
M       `num_replicas`      replicas
H       `sync_every`        inner steps    1 with one fragment and no overlap is data parallelism
P       `num_fragments`     fragments
tau     `overlap_steps`     inner steps
======  ==================  =============  ========================================================

Read in this order: `bytes_sent` (bytes of a payload), `tcp` (latency and loss), `simulation`
(utilization, and the bandwidth for a target), `layer_sums` (tensor parallelism), `store` (elastic
replicas), `model` (layers and fragments), `training` (the user's run), `methods` (the compared
methods), `inside` (traffic within a replica), `pace` (what `sync_every="auto"` would choose),
`advice` (a fixed setting of Streaming DiLoCo), `choice` (the strategy), `command`
(`commfree-plan`).

Latency is one way; consecutive messages do not wait for each other's latency. Encoding, decoding
and the outer optimizer take the time that you pass (`sync_seconds`). Not modelled: replicas of
different speed, memory, the bursts in which an elastic replica stores its state (its bytes count).
"""

from commfree_planner.advice import Advice, advise
from commfree_planner.bytes_sent import all_reduce_bytes, exchange_bytes, payload_bytes
from commfree_planner.choice import Choice, choose
from commfree_planner.inside import inside_bytes, inside_line
from commfree_planner.layer_sums import LayerSums
from commfree_planner.methods import Method, methods
from commfree_planner.model import Model, build_exchange
from commfree_planner.simulation import Exchange, Message, log_grid, needed_bandwidth, utilization
from commfree_planner.training import Training

__all__ = [
    "Advice",
    "Choice",
    "Exchange",
    "Training",
    "LayerSums",
    "Message",
    "Method",
    "Model",
    "advise",
    "all_reduce_bytes",
    "build_exchange",
    "choose",
    "exchange_bytes",
    "inside_bytes",
    "inside_line",
    "log_grid",
    "methods",
    "needed_bandwidth",
    "payload_bytes",
    "utilization",
]
