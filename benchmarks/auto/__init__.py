"""What `sync_every="auto"` chooses on links of the laboratory, and how much training then computes.

Modules: `cells` (links and models), `job` (one node's fit), `__main__` (runs and the page).
"""
