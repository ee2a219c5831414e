"""The loss of Streaming DiLoCo compared with DDP, over model size.

In reading order: `corpus` builds the text from a Debian package, `cells` defines the runs and their
order, `played` runs all replicas of a cell in one process with the library's own algorithm, `peers`
trains with methods of other libraries, `records` keeps the results, `page` writes the result page.
"""
