"""The page that `--help` prints: the command's own text, and the choices in each group.

Hydra's own page offers every file in `conf/` to every command, and appears only after all libraries
are imported, which takes seconds.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from string import Template

from omegaconf import OmegaConf

CONF = Path(__file__).parents[2] / "conf"
_WIDTH = 80  # of the narrowest terminal in use
_HYDRAS = r"^(defaults|hydra):"  # paragraphs of a primary configuration that are Hydra's


def help_text(config_name: str) -> str:
    """Return the page of the command whose primary configuration is `conf/CONFIG_NAME.yaml`."""
    page = OmegaConf.load(CONF / "hydra" / "help" / f"{config_name}.yaml")
    lines = []
    for group in _groups_of(config_name):
        names = _experiments(config_name) if group == "experiment" else choices(group)
        lines += textwrap.wrap(
            f"{group}: {', '.join(names)}",
            _WIDTH,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    paragraphs = (CONF / f"{config_name}.yaml").read_text().strip().split("\n\n")
    keys = [p for p in paragraphs if not re.search(_HYDRAS, p, re.MULTILINE)]
    return Template(page.template).substitute(
        APP_CONFIG_GROUPS="\n".join(lines), CONFIG="\n".join(keys)
    )


def check_experiment(config_name: str, words: list[str]) -> None:
    """Refuse an experiment of another command.

    Raises:
        ValueError: names the command that accepts it.
    """
    own = _experiments(config_name)
    for command in ("pretrain", "finetune"):
        for name in {*_experiments(command)} - {*own}:
            if f"experiment={name}" in words:
                raise ValueError(
                    f"recipes.{config_name} cannot run `experiment={name}`; its experiments are"
                    f" {', '.join(own)}. Run it by python -m recipes.{command} experiment={name}"
                )


def check_lists(words: list[str]) -> None:
    """Refuse sections in a list of files, such as `callbacks=[{_target_: ...}]`.

    Raises:
        ValueError: shows how to add a section.
    """
    for word in words:
        if found := re.match(r"\+*(callbacks|logger)=\[\s*\{", word):
            group = found[1]
            raise ValueError(
                f"`{group}=[...]` takes names of files in conf/{group}/:"
                f" {', '.join(choices(group))}. Add an object of your own by"
                f" '+{group}.NAME={{_target_: ...}}'."
            )


def choices(group: str) -> list[str]:
    """Return the names of the files in a group of `conf/`, sorted."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def groups() -> list[str]:
    """Return the groups of `conf/` without Hydra's own, sorted."""
    folders = (path for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")
    return sorted(path.name for path in folders)


def _experiments(config_name: str) -> list[str]:
    """Return the experiments of a command; the first lines of each file contain its command."""
    command = "pretrain" if config_name == "compare" else config_name  # whose jobs pretrain
    return [
        name
        for name in choices("experiment")
        if f"-m recipes.{command} experiment={name}"
        in (CONF / "experiment" / f"{name}.yaml").read_text()
    ]


def _groups_of(config_name: str) -> list[str]:
    """Return the groups in a primary configuration's list of defaults, sorted."""
    found: set[str] = set()
    for entry in OmegaConf.load(CONF / f"{config_name}.yaml").defaults:
        if isinstance(entry, str):  # the primary configuration that this one extends
            found.update(_groups_of(entry) if entry != "_self_" else ())
        else:
            found.update(map(str, entry))
    return sorted(found & set(groups()))
