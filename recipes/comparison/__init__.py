"""One job under several strategies, and a page that sets them side by side.

In reading order: `jobs` (one list of overrides becomes one per strategy), `running` (each in
processes of its own, kept once it is done), `watching` (how far it is), `outcome` (what a run has
left), `figures` and `page`.
"""
