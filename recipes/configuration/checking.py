"""Check every key and value of a composed configuration before anything starts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ValidationError

from recipes.configuration.schema import PRIMARY
from recipes.configuration.signatures import parameters, target_model


def check_config(cfg: DictConfig, config_name: str | None) -> None:
    """Refuse unknown keys and illegal values.

    Args:
        cfg: composed.
        config_name: of the primary configuration; a user's own may have any keys at its root.

    Raises:
        MissingMandatoryValue: a value that must be given is missing.
        ValueError: one sentence for each wrong key or value; or from the strategy's constructor.
        TypeError: from the strategy's constructor.
    """
    values: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    problems: dict[str, str] = {}  # path to sentence
    primary = PRIMARY.get(config_name)
    if primary is not None:
        text, own = OmegaConf.to_yaml(cfg), primary.model_fields
        # users may add keys of their own for others to refer to
        root = {
            key: value for key, value in values.items() if key in own or f"${{{key}" not in text
        }
        problems |= _problems(primary, root, "", f"conf/{config_name}.yaml", own)
    for path, section in targets(values):
        target = section["_target_"]
        plain = {
            key: value
            for key, value in section.items()
            if not (key.startswith("_") or (isinstance(value, dict) and "_target_" in value))
        }
        try:
            model = target_model(target, plain)
        except ImportError:
            problems[f"{path}_target_"] = (
                f"`{path}_target_={target}` cannot be imported. Check the name, and that its"
                " package is installed and new enough."
            )
            continue
        problems |= _problems(model, plain, path, target, parameters(target)[0])
    if problems:
        written = OmegaConf.to_container(cfg, resolve=False)
        own_values = [text for path, text in problems.items() if not _is_reference(written, path)]
        raise ValueError("\n".join(own_values or problems.values()))
    if "strategy" in values:
        instantiate(values["strategy"], _convert_="all")


def _problems(
    model: type[BaseModel], values: Any, prefix: str, reader: str, names: Iterable[str]
) -> dict[str, str]:
    """Return a sentence for every key of a section that pydantic refuses, by path.

    `prefix` is the section's path with a dot at its end, `reader` uses it, `names` are legal keys.
    """
    try:
        model.model_validate_json(json.dumps(values))  # only in JSON a list may be a tuple
        return {}
    except ValidationError as error:
        found = error.errors()
    problems: dict[str, str] = {}
    for one in found:
        name, value = _place(values, one["loc"])
        path, why = prefix + name, one["msg"].removeprefix("Input ").removeprefix("Value error, ")
        why = why.replace("Field required", "should have more entries")
        if one["type"] == "missing" and isinstance(value, dict):  # deleted by ~KEY
            path = prefix + ".".join(map(str, one["loc"]))
            problems[path] = f"`{path}` must be given."
        elif one["type"] == "extra_forbidden":
            nested = getattr(model.model_fields.get(str(one["loc"][0])), "annotation", model)
            legal = names if nested is model else nested.model_fields
            problems[path] = unknown_key(path, legal, reader)
        elif path not in problems:
            of = f" for {reader}" if prefix else ""
            problems[path] = f"`{path}={json.dumps(value)}` is not legal{of}: it {why}."
        elif why not in problems[path]:  # another member of a union
            problems[path] = f"{problems[path][:-1]}; or it {why}."
    return problems


def _is_reference(written: Any, path: str) -> bool:
    """Return whether a key or a section above it takes its value from another key (`${...}`)."""
    for part in path.split("."):
        if not isinstance(written, dict | list):
            break
        written = written[int(part)] if isinstance(written, list) else written.get(part)
    return isinstance(written, str) and "${" in written


def _place(values: Any, location: tuple[int | str, ...]) -> tuple[str, Any]:
    """Return a key's path and value; further parts of pydantic's location name union members."""
    keys: list[str] = []
    for part in location:
        if not isinstance(values, dict) or part not in values:
            break
        keys.append(str(part))
        values = values[part]
    return ".".join(keys), values


def targets(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every section with a `_target_`, each with its path, such as "data.corpus."."""
    if isinstance(node, dict):
        if isinstance(node.get("_target_"), str):
            yield path, node
        for key, value in node.items():
            yield from targets(value, f"{path}{key}.")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from targets(value, f"{path}{index}.")


def unknown_key(path: str, names: Iterable[str], reader: str) -> str:
    """Return the sentence for an unknown key of a section with the legal keys `names`."""
    parent, _, key = path.rpartition(".")
    legal = sorted(names)
    near = nearest(key, legal)
    meant = f"{parent}.{near}" if parent else near
    hint = f": did you mean `{meant}`?" if near else f". There are: {', '.join(legal)}."
    return f"`{path}` is not a key of {reader}{hint}"


def nearest(word: str, words: Iterable[str]) -> str | None:
    """Return the most similar word, or one that contains `word`; None if there is none."""
    words = sorted(words)
    close = get_close_matches(word, words, n=1)
    # diloco for streaming_diloco: a part of a name differs from it in most letters
    parts = [candidate for candidate in words if len(word) > 2 and word in candidate]
    return next(iter(close + parts), None)
