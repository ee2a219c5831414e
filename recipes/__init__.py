"""Recipes: complete training programs around the library, to run, read and copy.

`python -m recipes.pretrain` is run from the repository's root and configured by the YAML files in
`conf/`. Nothing in `lightning_commfree` imports from here. In reading order:

- `pretrain`: a composed configuration in, `Trainer.fit` out;
- `language_model`, `optimizer`: the LightningModule for any causal language model of transformers;
- `corpus`, `tokenizer`, `token_blocks`, `data`, `resumable`: from text files to the batches of a
  rank;
- `progress`, `report`, `evaluation`, `traffic`, `figures`: what the person at the keyboard sees.
"""
