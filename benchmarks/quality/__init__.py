"""The loss of Streaming DiLoCo compared with DDP on the same tokens.

`grid` defines the runs, `page` writes the result page.
"""
