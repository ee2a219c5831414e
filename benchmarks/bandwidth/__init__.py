"""How long does a step of each way to train take over slow links, and what does it send?

Streaming DiLoCo beside DDP and torchft, on two nodes of the laboratory. `measure` runs a `job` (or
`torchft_job`) in every node, of which `window` takes the figures; `figures` are their medians,
`chain` says whether each row is no slower than the one that it adds to, `page` writes it up.
"""
