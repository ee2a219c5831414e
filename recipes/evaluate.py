r"""Evaluate the model of a finished run: its loss and perplexity on the run's validation data.

Run it from the folder in which the run was started, so that the paths in its configuration hold::

    python -m recipes.evaluate outputs/pretrain/2026-01-31_12-00-00
"""

from __future__ import annotations

import argparse

from recipes.configuration.application import short_errors


def main() -> None:
    """Read the command line, evaluate, and print the result."""
    parser = argparse.ArgumentParser("python -m recipes.evaluate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "run_folder", help="of recipes.pretrain, recipes.finetune or a compared job"
    )
    options = parser.parse_args()
    with short_errors():
        # here: importing torch takes seconds, which `--help` does not need
        from recipes.training.finished import evaluate
        from recipes.training.summary import print_panel

        print_panel("Evaluation", evaluate(options.run_folder))


if __name__ == "__main__":
    main()
