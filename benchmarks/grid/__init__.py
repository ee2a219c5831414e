"""Utilization of four ranks over a grid of links, measured beside the planner's predictions.

`cells` contains the links, the rows and the published figures; a `job` runs the rows of a cell in
each of four nodes of the laboratory, `probe` measures the links themselves; `predict` asks the
planner, `measure` runs a cell, and `page` writes the result page.
"""
