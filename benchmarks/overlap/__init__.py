"""How much of tensor parallelism's communication does Domino hide?

`ways` are the ways to train that are compared, `rounds` plays their steps in turn, in one process
over a `link` that only takes time or in a `job` of the laboratory; `trace` keeps a step's timeline,
`medians`, `page` and `method` write it up.
"""
