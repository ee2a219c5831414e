"""What a link of so many Gbit/s makes of a training run, before anything is trained.

The simulation of arXiv:2501.18512 (section 3.1, Table 4): a step is a graph of forward, activation
gradient, parameter gradient and exchange, layer by layer; of the network only the bandwidth between
the sites counts. *Utilization* is the time of computing over the time that a step takes, waiting
included. Pure Python: nothing but the standard library.

======  ==================  =============  ========================================================
symbol  name here           unit           meaning
======  ==================  =============  ========================================================
--      `step_seconds`      seconds        an inner step that waits for nobody
--      `gbit_per_s`        10^9 bit/s     what a replica can send to the others, all its ranks
                                           together; it receives as much meanwhile
M       `num_replicas`      replicas
H       `sync_every`        inner steps    1 with one fragment and no overlap is data parallelism
P       `num_fragments`     fragments
tau     `overlap_steps`     inner steps
======  ==================  =============  ========================================================

Read in this order: `bytes_sent` (how many bytes), `model` (which leave together), `dag` (when),
`layer_sums` (what tensor parallelism sends within a step), `training` (the user's run), `methods`
(that are compared), `inside` (what a replica's ranks send to each other), `search` (the bandwidth
that a target needs), `advice` (a setting of Streaming DiLoCo), `choice` (which strategy).

Latency is that of the link, one way; messages that follow each other do not wait for it. What is
not modelled: encoding and decoding, the outer optimizer's time, replicas of different speed,
memory.
"""

from commfree_planner.advice import Advice, advise
from commfree_planner.bytes_sent import all_reduce_bytes, exchange_bytes, payload_bytes
from commfree_planner.choice import Choice, choose
from commfree_planner.dag import Exchange, Message, utilization
from commfree_planner.inside import inside_bytes, inside_line
from commfree_planner.layer_sums import LayerSums
from commfree_planner.methods import Method, methods
from commfree_planner.model import Model, build_exchange
from commfree_planner.search import log_grid, needed_bandwidth
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
