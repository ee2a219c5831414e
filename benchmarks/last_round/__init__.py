"""How a DiLoCo fit should end: with an outer step or with the mean of the local weights.

`runs` defines the runs, `simulated` trains all replicas of a run in one process, `page` writes the
result page.
"""
