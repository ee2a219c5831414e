r"""Generate text with the model of a finished run.

The prompt is continued as it is: for a model tuned on conversations, write it as its chat template
does. A folder with a Hugging Face model can take the place of the run's folder::

    python -m recipes.generate outputs/pretrain/2026-01-31_12-00-00 --prompt 'HAMLET.'
    python -m recipes.generate path/to/model --prompt 'Once' --tokens 50 --temperature 0
"""

from __future__ import annotations

import argparse

from recipes.configuration.application import short_errors


def main() -> None:
    """Read the command line, and print the prompt and its continuation."""
    parser = argparse.ArgumentParser("python -m recipes.generate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run_folder", help="of a run, or with a Hugging Face model")
    parser.add_argument("--prompt", required=True, help="beginning of the text")
    parser.add_argument("--tokens", type=int, default=100, help="at most; default 100")
    help = "0: always the most likely token; default 0.8"
    parser.add_argument("--temperature", type=float, default=0.8, help=help)
    parser.add_argument("--seed", type=int, default=0, help="of the sampling; default 0")
    options = parser.parse_args()
    if options.tokens < 1:
        parser.error(f"--tokens {options.tokens} must be at least 1")
    if not 0 <= options.temperature < float("inf"):
        parser.error(f"--temperature {options.temperature} must be 0 or a positive number")
    with short_errors():
        # here: importing torch takes seconds, which `--help` does not need
        from recipes.training.finished import generate

        print(
            generate(
                options.run_folder,
                options.prompt,
                options.tokens,
                options.temperature,
                options.seed,
            )
        )


if __name__ == "__main__":
    main()
