r"""Fine-tune a pretrained language model: from a composed configuration to `Trainer.fit`.

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
    """Run one job; return its validation loss, for Hydra sweepers that optimize it."""
    # here: importing torch takes seconds, which `--help` does not need
    from recipes.training.finetuning import build
    from recipes.training.run import run_job

    return run_job(cfg, build)


if __name__ == "__main__":
    main()
