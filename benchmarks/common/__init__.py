"""Helpers shared by several benchmarks.

`page` (result pages), `runs` (a grid of runs whose results are kept between calls), `ladder`
(learning-rate search), `relay` (fits in one process that take turns), `timing` (operations that
take turns), `fits` (small GPT-2 fits), `pretraining` (runs of `recipes.pretrain`).
"""
