"""Which keys somebody reads, and which of them the user may have meant."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

CONF = Path(__file__).parents[2] / "conf"

# whose `**kwargs` go to whom
_PASSES_ON = {
    "lightning.pytorch.strategies.ddp.DDPStrategy": "torch.nn.parallel.DistributedDataParallel",
    "lightning.pytorch.loggers.wandb.WandbLogger": "wandb.init",
    "lightning.pytorch.loggers.tensorboard.TensorBoardLogger": (
        "torch.utils.tensorboard.SummaryWriter"
    ),
}


def check_keys(cfg: DictConfig, config_name: str | None) -> None:
    """Refuse keys that were added to a configuration and that nobody reads.

    Below a `_target_` it is the target's parameters that are legal; at the root, what the primary
    configuration has, its groups, and what another key refers to.

    Args:
        cfg: composed.
        config_name: of the primary configuration; one that is not in `conf/` may have any root
            keys.

    Raises:
        ValueError: names the first such key and the nearest legal one.
    """
    primary = CONF / f"{config_name}.yaml"
    if primary.is_file():
        legal, text = _root_keys(primary), OmegaConf.to_yaml(cfg)
        for key in map(str, cfg):
            if key not in legal and f"${{{key}" not in text:
                raise ValueError(unknown_key(key, legal, f"conf/{primary.name}"))
    for path, node in targets(OmegaConf.to_container(cfg)):
        parameters = parameters_of(node["_target_"])
        if parameters is None:
            continue
        for key in node:
            if not key.startswith("_") and key not in parameters:
                raise ValueError(unknown_key(f"{path}{key}", parameters, node["_target_"]))


def parameters_of(target: str) -> set[str] | None:
    """Return the names of what a `_target_` takes by keyword; None: anything, or nobody can say."""
    found = get_object(target)
    if is_model_config(found):
        # its constructor takes everything and reads what it knows: what a config without arguments
        # has
        return {*found().to_dict(), *found.attribute_map}
    names: set[str] = set()
    for function in constructors(found):
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:  # written in C
            return None
        names |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return names - {"self"}
    return None


def is_model_config(found: Any) -> bool:
    """Return whether it is a class of transformers' configs."""
    if "transformers" not in sys.modules:  # whose import takes half a second; so it is none
        return False
    from transformers import PretrainedConfig

    return isinstance(found, type) and issubclass(found, PretrainedConfig)


def targets(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what has a `_target_`, each with its place, such as "data.corpus."."""
    if isinstance(node, dict):
        if isinstance(node.get("_target_"), str):
            yield path, node
        for key, value in node.items():
            yield from targets(value, f"{path}{key}.")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from targets(value, f"{path}{index}.")


def unknown_key(
    full_key: str, legal: Iterable[str], reader: str, elsewhere: Iterable[str] = ()
) -> str:
    """Return a sentence on a key that is none.

    Args:
        full_key: with dots.
        legal: keys that could stand in its place, without what is before the last dot.
        reader: who has no such key.
        elsewhere: full keys in other places that may have been meant.
    """
    parent, _, key = full_key.rpartition(".")
    legal = sorted(legal)
    near = nearest(key, legal) or nearest(full_key, elsewhere)
    if near:
        meant = f"{parent}.{near}" if parent and near in legal else near
        return f"`{full_key}` is no key of {reader}: did you mean `{meant}`?"
    return f"`{full_key}` is no key of {reader}. There are: {', '.join(legal)}."


def nearest(word: str, words: Iterable[str]) -> str | None:
    """Return the word that somebody may have meant who wrote another; None: none is near."""
    words = sorted(words)
    close = get_close_matches(word, words, n=1)
    # diloco for streaming_diloco: a part of a name is far from it by letters
    parts = [candidate for candidate in words if len(word) > 2 and word in candidate]
    return next(iter(close + parts), None)


def choices(group: str) -> list[str]:
    """Return what may be chosen in a group of `conf/`, sorted."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def groups() -> list[str]:
    """Return the groups of `conf/`, sorted; those that are Hydra's own left out."""
    folders = (path for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")
    return sorted(path.name for path in folders)


def primary_groups(config_name: str) -> list[str]:
    """Return the groups of `conf/` that a primary configuration chooses from, sorted."""
    return sorted(_keys_and_groups(CONF / f"{config_name}.yaml")[1] & set(groups()))


def _root_keys(primary: Path) -> set[str]:
    keys, chosen = _keys_and_groups(primary)
    return keys | chosen


def _keys_and_groups(primary: Path) -> tuple[set[str], set[str]]:
    """Return a primary configuration's own keys, and the groups in its list of defaults."""
    config = OmegaConf.to_container(OmegaConf.load(primary))
    assert isinstance(config, dict), f"{primary} holds keys"
    keys = {str(key) for key in config} - {"defaults", "hydra"}
    chosen: set[str] = set()
    for entry in config.get("defaults", []):
        if isinstance(entry, dict):  # "override /strategy@here: ddp" is of the group "strategy"
            chosen |= {str(key).split()[-1].lstrip("/").split("@")[0] for key in entry}
        elif entry != "_self_":  # another primary configuration that this one begins with
            more, theirs = _keys_and_groups(primary.with_name(f"{entry}.yaml"))
            keys, chosen = keys | more, chosen | theirs
    return keys, chosen


def constructors(found: Any) -> Iterator[Any]:
    """Yield what reads the keywords: a function, or the constructors from a class on upwards."""
    if not isinstance(found, type):
        yield found
        return
    for ancestor in found.__mro__:
        if "__init__" in vars(ancestor):
            yield ancestor.__init__  # type: ignore[misc]
        passes_on = _PASSES_ON.get(f"{ancestor.__module__}.{ancestor.__qualname__}")
        if passes_on is not None:
            yield get_object(passes_on)
