"""What the training recipes share: the LightningModule and the Trainer with all that is around it.

In reading order: `language_model` and `optimizer`, then `progress`, `report`, `evaluation`,
`traffic`, `figures`: what the person at the keyboard sees.
"""
