"""Ground: checkpoint files that are whole or not there, and what single ranks know beside them.

Torch only; it knows neither a paper nor Lightning. `resume/` is built of it.
"""
