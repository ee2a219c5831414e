"""How should a DiLoCo fit end: with an outer step, or with the plain mean?

`runs` says which runs there are and makes one, by the replicas that `played` plays in one process;
`page` writes it up.
"""
