"""The share of tensor-parallel communication that Domino hides.

`methods` are compared step by step by `rounds`, in one process over a simulated `link` or in a
`job` of the laboratory; `trace` records the timeline of a step, `medians` and `page` evaluate.
"""
