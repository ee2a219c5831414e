r"""Tune a pretrained language model: a composed configuration in, `Trainer.fit` out.

Run it from the repository's root; every group of `conf/` can be swapped and every key overridden::

    python -m recipes.finetune experiment=finetune_demo
    python -m recipes.finetune model.name_or_path=gpt2 data=chat data.corpus.train=chats.jsonl \
        data.corpus.chat_template=recipes/data/templates/plain.jinja
    python -m recipes.finetune model.name_or_path=path/to/llama data=responses lora=default \
        'data.corpus.train=tasks/*.jsonl' optimizer.lr=2e-4
    python -m recipes.finetune model.name_or_path=gpt2 data=text data.block_size=512 \
        'data.corpus.train=books/*.txt' data.corpus.validation=held_out.txt
"""

from __future__ import annotations

from omegaconf import DictConfig

from recipes.configuration.application import application


@application("finetune")
def main(cfg: DictConfig) -> float | None:
    """Run one job; return its validation loss, for sweepers that look for the best."""
    # in here: they load torch and Lightning, seconds that `--help` shall not wait for
    from recipes.training.finetuning import build
    from recipes.training.run import run_job

    return run_job(cfg, build)


if __name__ == "__main__":
    main()
