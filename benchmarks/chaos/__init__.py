"""A seeded chaos bench: several methods on the same model, data, links and disturbances.

`python -m benchmarks.chaos` runs each method undisturbed and disturbed. In reading order: `events`
(what happens when), `job` (the processes of one run, and who disturbs them), `replica` and
`torchft_loop` (one process), `goodput` (the figures, from the logs), `page`. `plan` contains what
the processes exchange through files.
"""
