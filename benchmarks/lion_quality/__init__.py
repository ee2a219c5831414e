"""The loss of Distributed Lion compared with Lion and AdamW on the same tokens.

`grid` defines the runs, `simulated` trains all workers of a run in one process, `page` writes the
result page.
"""
