"""The network laboratory: slow links on one machine, real sockets, real waiting.

`netlab` makes nodes, links and a switch and runs jobs in them; `nodes` is what it does on the
host's command line. `python -m benchmarks.lab -- COMMAND` runs one command in every node. Whoever
uses the laboratory imports from here.
"""

from benchmarks.lab.netlab import BURST_KIB, JobResult, NetLab, why_unavailable
from benchmarks.lab.nodes import (
    Counters,
    LaboratoryUnavailable,
    exit_on_signals,
    interface_counters,
)

__all__ = [
    "BURST_KIB",
    "Counters",
    "JobResult",
    "LaboratoryUnavailable",
    "NetLab",
    "exit_on_signals",
    "interface_counters",
    "why_unavailable",
]
