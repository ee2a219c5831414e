"""Shared parts of the training recipes: the LightningModule, the Trainer and its callbacks.

In reading order: `run` (from a configuration to a fit), `language_model` and `optimizer`; checks
before anything is launched: `length`, `memory`, `resume`, `callbacks`, `elastic`; early ends:
`stopping`; output: `progress`, `report`, `evaluation`, `traffic`, `figures`; after a run:
`finished`.
"""
