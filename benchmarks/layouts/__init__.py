"""Memory and traffic of replicas with several ranks, by layout (DDP, FSDP2, Domino).

One page with three parts: `memory` (bytes per rank, and peaks of resident memory), `link` (step
time and bytes over a slow link between replicas), `large` (the largest Llama of which two replicas
of two ranks fit on this machine). Each module contains the work of its ranks, which `job` calls,
and its part of the page. `ranks` starts the processes and ends them before memory runs out.
"""
