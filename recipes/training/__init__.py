"""What the training recipes share: the LightningModule and the Trainer with all that is around it.

In reading order: `run` (a run from its configuration), `language_model` and `optimizer`; what is
settled before anything is launched: `length`, `memory`, `resume`; how it ends early: `stopping`;
then `progress`, `report`, `evaluation`, `traffic`, `figures`: what the person at the keyboard sees.
"""
