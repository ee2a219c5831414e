"""Network laboratory: slow links on one machine, with real sockets and real waiting.

`netlab` creates nodes, links and a switch and runs jobs in them; `nodes` contains the system
commands. `python -m benchmarks.lab -- COMMAND` runs one command in every node. Import from here.
"""

from benchmarks.lab.netlab import BURST_KIB, JobResult, NetLab, why_unavailable
from benchmarks.lab.nodes import (
    Counters,
    LaboratoryUnavailable,
    exit_on_signals,
    interface_counters,
    raise_priority,
)

__all__ = [
    "BURST_KIB",
    "Counters",
    "JobResult",
    "LaboratoryUnavailable",
    "NetLab",
    "exit_on_signals",
    "interface_counters",
    "raise_priority",
    "why_unavailable",
]
