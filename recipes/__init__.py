"""Recipes: complete training programs around the library, to run, read and copy.

`python -m recipes.pretrain` is run from the repository's root and configured by the YAML files in
`conf/`. Nothing in `lightning_commfree` imports from here. In reading order:

- `pretrain`: the command, and `training/pretraining.py`: a composed configuration in,
  `Trainer.fit` out;
- `finetune`, `training/finetuning.py`: the same for a model that has been pretrained;
- `training/`: the LightningModule, optimizers, and what the person at the keyboard sees;
- `data/`: from text files to the batches of a rank;
- `compare`, `comparison/`: one job under several strategies, on one page;
- `configuration/`: a command made of a YAML file, with checked keys and errors in a sentence;
- `plan`, `planning`: what a link makes of a run, foretold;
- `stages`: what is said while something takes long.

Commands load torch and Lightning when they run a job, not for `--help`: so they are files of their
own.
"""
