"""What `--help` prints: the command's own text, and what may be chosen for it.

Hydra's page would take every file of `conf/` for a choice of every command, and is told of nothing
before all libraries are loaded.
"""

from __future__ import annotations

import re
import textwrap
from string import Template

from omegaconf import OmegaConf

from recipes.configuration.keys import CONF, choices, primary_groups

_WIDTH = 80  # the narrowest terminal that people use; a page does not follow a wider one
_EXPERIMENT = "experiment"
_NO_KEYS = r"^(defaults|hydra):"  # paragraphs of a primary configuration that are Hydra's


def help_text(config_name: str) -> str:
    """Return the page of a command.

    Args:
        config_name: of its primary configuration, `conf/CONFIG_NAME.yaml`.
    """
    page = OmegaConf.load(CONF / "hydra" / "help" / f"{config_name}.yaml")
    parts = {"APP_CONFIG_GROUPS": _choices(config_name), "CONFIG": _keys(config_name)}
    return Template(page.template).substitute(parts)


def check_experiment(config_name: str, words: list[str]) -> None:
    """Refuse an experiment that is another command's.

    Args:
        config_name: of the command's primary configuration.
        words: of its command line.

    Raises:
        ValueError: names the command that takes it.
    """
    for word in words:
        _, found, name = word.partition(f"{_EXPERIMENT}=")
        if not found or not (CONF / _EXPERIMENT / f"{name}.yaml").is_file():
            continue
        theirs = _command_of(name)
        if theirs != _trained_by(config_name):
            raise ValueError(
                f"`{_EXPERIMENT}={name}` is no run of recipes.{config_name}, whose experiments are"
                f" {', '.join(_experiments(config_name))}. Run it by python -m recipes.{theirs}"
                f" {_EXPERIMENT}={name}"
            )


def _choices(config_name: str) -> str:
    lines = []
    for group in primary_groups(config_name):
        legal = _experiments(config_name) if group == _EXPERIMENT else choices(group)
        listed = f"{group}: {', '.join(legal)}"
        lines += textwrap.wrap(
            listed, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(lines)


def _experiments(config_name: str) -> list[str]:
    trained_by = _trained_by(config_name)
    return [name for name in choices(_EXPERIMENT) if _command_of(name) == trained_by]


def _trained_by(config_name: str) -> str:
    """Return whose runs a command starts: a comparison's jobs are pretrainings."""
    return "pretrain" if config_name == "compare" else config_name


def _command_of(experiment: str) -> str:
    """Return the command that an experiment is for: the first one that its file's head names."""
    text = (CONF / _EXPERIMENT / f"{experiment}.yaml").read_text()
    found = re.search(rf"^# .*-m recipes\.(\w+) {_EXPERIMENT}={experiment}\b", text, re.MULTILINE)
    assert found is not None, f"conf/{_EXPERIMENT}/{experiment}.yaml begins with its command"
    return found[1]


def _keys(config_name: str) -> str:
    """Return the keys of a primary configuration as its file has them, with what they mean."""
    paragraphs = (CONF / f"{config_name}.yaml").read_text().strip().split("\n\n")
    return "\n".join(p for p in paragraphs if not re.search(_NO_KEYS, p, re.MULTILINE))
