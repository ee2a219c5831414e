"""Step time and traffic over slow links: Streaming DiLoCo compared with DDP and torchft.

`measure` runs a `job` (or `torchft_job`) in each of two nodes of the laboratory, where `window`
times the steps; `figures` computes medians and verdicts, `page` writes the result page.
"""
