r"""Pretrain a language model: from a composed configuration to `Trainer.fit`.

Run it from the repository's root; every group of `conf/` can be swapped and every key overridden::

    python -m recipes.pretrain experiment=demo
    python -m recipes.pretrain strategy=ddp model=llama_tiny trainer.max_steps=200
    python -m recipes.pretrain data=text 'data.corpus.train=books/*.txt' \
        data.corpus.validation=held_out.txt token_budget=10e6
    python -m recipes.pretrain hydra.run.dir=outputs/pretrain/2026-01-31_12-00-00 ckpt_path=last
"""

from __future__ import annotations

from omegaconf import DictConfig

from recipes.configuration.application import application


@application("pretrain")
def main(cfg: DictConfig) -> float | None:
    """Run one job; return its validation loss, for Hydra sweepers that optimize it."""
    # here: importing torch takes seconds, which `--help` does not need
    from recipes.training.pretraining import build
    from recipes.training.run import run_job

    return run_job(cfg, build)


if __name__ == "__main__":
    main()
