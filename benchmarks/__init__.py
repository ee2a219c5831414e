"""Benchmarks: one folder per question, with its command and committed result.

`python -m benchmarks.NAME` measures and writes `NAME/result.md`; `README.md` lists them. In a
folder, `__main__` is the command, `job` runs in the measured processes, and `page` writes the page.
`common` contains shared helpers, `lab` the network laboratory. Benchmarks import the library and
the recipes. Recipes import only `lab` from here, and the library imports nothing.
"""
