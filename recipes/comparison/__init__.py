"""Run one job under several strategies and compare the results on a page.

In reading order: `jobs` (one list of overrides becomes one per strategy), `running` (runs each in
its own processes and keeps finished ones), `watching` (shows the progress), `outcome` (reads the
results of a run), `figures` and `page`.
"""
