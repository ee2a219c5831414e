"""A command made of a function: composed by Hydra, checked, and ended by a sentence if it fails."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from recipes.configuration.help import check_experiment, help_text
from recipes.configuration.keys import CONF, check_keys
from recipes.configuration.sentences import sentence
from recipes.configuration.values import check_values
from recipes.stages import stage

Task = Callable[[DictConfig], Any]

_LIBRARIES = ("torch", "lightning.pytorch", "transformers")  # of all tasks: seconds, told as such
FULL_ERROR = "HYDRA_FULL_ERROR"  # Hydra's own variable: "1" asks for tracebacks
HINT = f"Set the environment variable {FULL_ERROR}=1 for a complete stack trace."


def application(config_name: str) -> Callable[[Task], Callable[[], None]]:
    """Make the command of a recipe: `conf/CONFIG_NAME.yaml`, the words of the command line, a task.

    It stands for `hydra.main` and does two things besides. A key that nobody reads, or a value that
    its reader does not take, is refused before the task begins. And an error that the user can
    repair, in the configuration or raised on purpose by a recipe, is told in a sentence, exit code
    1; any other shows its traceback, and with HYDRA_FULL_ERROR=1 all do.

    Args:
        config_name: of the primary configuration, without its suffix.

    Example::

        @application("pretrain")
        def main(cfg: DictConfig) -> None: ...
    """

    def decorate(task: Task) -> Callable[[], None]:
        @functools.wraps(task)
        def checked(cfg: DictConfig) -> Any:
            config_name = HydraConfig.get().job.config_name
            with _loading():
                check_keys(cfg, config_name)
                check_values(cfg, config_name)
                for library in _LIBRARIES:
                    import_module(library)
            return task(cfg)

        @functools.wraps(task)
        def job(cfg: DictConfig) -> Any:
            with _environment(FULL_ERROR, None):  # processes that the job starts inherit it
                return checked(cfg)

        as_hydra = hydra.main(config_path=str(CONF), config_name=config_name, version_base="1.3")

        @functools.wraps(task)
        def main() -> None:
            if os.environ.get(FULL_ERROR) == "1":
                as_hydra(checked)()
                return
            try:
                words = sys.argv[1:]
                if not {"--help", "-h"}.isdisjoint(words):
                    print(help_text(config_name))
                    return
                check_experiment(config_name, words)
                # with the variable Hydra lets errors through, of which it would only print the text
                with _environment(FULL_ERROR, "1"):
                    as_hydra(job)()
            except Exception as error:
                told = sentence(error)
                if told is None:
                    raise
                sys.exit(f"{told}\n\n{HINT}")

        return main

    return decorate


@contextmanager
def _loading() -> Iterator[None]:
    """Say at once that a command has begun: whoever reads its keys loads libraries for seconds."""
    if "torch" in sys.modules:
        yield
        return
    with stage("loading torch, Lightning and transformers", at_once=True):
        yield


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    before = os.environ.get(name)
    _set(name, value)
    try:
        yield
    finally:
        _set(name, before)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
