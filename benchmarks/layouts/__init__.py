"""Memory of a rank of a replica, by layout (DDP, FSDP2).

`memory` contains the work of the ranks and the page; `ranks` starts their processes, which run
`job`.
"""
