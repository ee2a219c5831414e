"""The resolved configuration of a run: print it as a tree, save it in the run's folder, read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from rich.text import Text
from rich.tree import Tree

CONFIG_FILE = "config.yaml"


def config_tree(config: dict[str, Any]) -> Tree:
    """Return a tree for a terminal with every key and value."""
    tree = Tree("configuration", guide_style="dim")
    _grow(tree, config)
    return tree


def save_config(config: dict[str, Any], run_dir: str) -> None:
    """Write `config.yaml` into the run's folder."""
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(config), Path(run_dir) / CONFIG_FILE)


def load_config(run_dir: Path) -> dict[str, Any]:
    """Read what `save_config` has written.

    Raises:
        FileNotFoundError: the folder is not one of a run.
    """
    path = run_dir / CONFIG_FILE
    if not path.exists():
        raise FileNotFoundError(
            f"'{run_dir}' has no {CONFIG_FILE}. Give the folder of a run of recipes.pretrain or"
            " recipes.finetune, such as outputs/pretrain/2026-01-31_12-00-00."
        )
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(path)))


def _grow(branch: Tree, section: dict[str, Any]) -> None:
    for key, value in section.items():
        if isinstance(value, dict) and value:
            _grow(branch.add(Text(key, style="bold")), value)
        else:
            is_line = isinstance(value, str) and "\n" not in value
            shown = value if is_line else json.dumps(value, ensure_ascii=False)
            branch.add(Text(f"{key}: {shown}"))
