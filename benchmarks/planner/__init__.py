"""The planner compared with the paper's simulation.

`tables` contains the papers' figures, `cells` computes ours.
"""
