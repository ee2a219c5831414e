"""Turn a function into a command: compose and check its configuration, report errors briefly."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from recipes.configuration.help import CONF, check_experiment, check_lists, help_text
from recipes.stages import stage

Task = Callable[[DictConfig], Any]

_LIBRARIES = ("torch", "lightning.pytorch", "transformers")  # of all tasks; loading takes seconds
FULL_ERROR = "HYDRA_FULL_ERROR"  # Hydra's own variable: "1" asks for tracebacks
HINT = f"Set the environment variable {FULL_ERROR}=1 for a complete stack trace."


def application(config_name: str) -> Callable[[Task], Callable[[], None]]:
    """Make the command of a recipe from its task and `conf/CONFIG_NAME.yaml`.

    Like `hydra.main`, but it refuses unknown keys and illegal values before the task begins, and
    ends with exit code 1 and one sentence where the user can repair an error: one in the
    configuration, or one that a recipe raises on purpose. Other errors show their traceback; with
    HYDRA_FULL_ERROR=1 all do.
    """

    def decorate(task: Task) -> Callable[[], None]:
        @functools.wraps(task)
        def checked(cfg: DictConfig) -> Any:
            # at once, or a user would look at an empty screen for seconds
            is_first = "torch" not in sys.modules
            told = "loading torch, Lightning and transformers"
            with stage(told, at_once=True) if is_first else nullcontext():
                from recipes.configuration.checking import check_config

                for library in _LIBRARIES:
                    import_module(library)
                check_config(cfg, HydraConfig.get().job.config_name)
            return task(cfg)

        @functools.wraps(task)
        def job(cfg: DictConfig) -> Any:
            with _full_error(None):  # processes that the job starts inherit it
                return checked(cfg)

        as_hydra = hydra.main(config_path=str(CONF), config_name=config_name, version_base="1.3")

        @functools.wraps(task)
        def main() -> None:
            words = sys.argv[1:]
            if os.environ.get(FULL_ERROR) == "1":
                as_hydra(checked)()
            elif not {"--help", "-h"}.isdisjoint(words):
                print(help_text(config_name))
            else:
                # "1" makes Hydra pass errors on, of which it would only print the text
                with short_errors(), _full_error("1"):
                    check_experiment(config_name, words)
                    check_lists(words)
                    as_hydra(job)()

        return main

    return decorate


@contextmanager
def short_errors() -> Iterator[None]:
    """End the program with one sentence for an error in the body that the user can repair.

    Other errors show their traceback; with HYDRA_FULL_ERROR=1 all do.
    """
    wants_all = os.environ.get(FULL_ERROR) == "1"
    try:
        yield
    except Exception as error:
        # here: pydantic is not needed for a job that ends well, nor for --help
        from recipes.configuration.sentences import sentence

        told = None if wants_all else sentence(error)
        if told is None:
            raise
        sys.exit(f"{told}\n\n{HINT}")


@contextmanager
def _full_error(value: str | None) -> Iterator[None]:
    """Set Hydra's environment variable in a `with` block; None unsets it."""
    before = os.environ.pop(FULL_ERROR, None)
    if value is not None:
        os.environ[FULL_ERROR] = value
    try:
        yield
    finally:
        os.environ.pop(FULL_ERROR, None)
        if before is not None:
            os.environ[FULL_ERROR] = before
