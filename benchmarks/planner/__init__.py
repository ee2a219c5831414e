"""Does the planner agree with the paper's simulation?

`tables` are the papers' figures, `cells` ours beside them.
"""
