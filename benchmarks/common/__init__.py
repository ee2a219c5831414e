"""What several benchmarks share.

`page` and `kept` (pages and results that are kept), `side_by_side` (runs at the same time), `relay`
(fits in one process that take turns), `ladder` (the search for a learning rate), `timing`,
`pretraining` (a run of `recipes.pretrain`).
"""
