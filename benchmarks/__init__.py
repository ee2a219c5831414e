"""What has been measured, and how: a folder per question, each a command.

`python -m benchmarks.QUESTION` measures and writes `result.md` beside it; `benchmarks/README.md`
lists the questions. In a folder, `__init__` asks the question, `__main__` is the command, `job` is
what a process or node runs, `page` makes the page. `common/` is what they share, `lab/` the network
laboratory. Benchmarks use the library and the recipes; of what is here recipes use the laboratory
alone, and the library nothing.
"""
