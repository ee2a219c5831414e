"""Recipes: complete training programs around the library, to run, read and copy.

`python -m recipes.pretrain` is run from the repository's root and configured by the YAML files in
`conf/`. Nothing in `lightning_commfree` imports from here. In reading order:

- `pretrain` (the command), `training/pretraining.py`: from a composed configuration to
  `Trainer.fit`;
- `finetune`, `training/finetuning.py`: the same for a pretrained model;
- `training/`: the LightningModule, optimizers, progress, report, checkpoints and logging;
- `data/`: from text files to the batches of a rank;
- `evaluate`, `generate`: the same model after its run (`training/finished.py`);
- `compare`, `comparison/`: one job under several strategies, with a page of results;
- `configuration/`: from the command line to a checked configuration;
- `plan`, `planning`: estimate the effect of a slow link before training;
- `stages`: progress of slow operations; `sweeps`: the table after a sweep.

Each command is a small file of its own, so that `--help` does not import torch and Lightning.
"""
