"""Whether every value has a type and a range that its reader takes, before anything starts.

Types are those of the signature of what `_target_` names; `ranges` has what signatures do not say.
pydantic compares them, strictly: 3.7 and "3" and true are no whole numbers.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import SchemaError

from recipes.configuration.keys import constructors, is_model_config
from recipes.configuration.ranges import RANGES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ANY_CLASS = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
_MISSING = "???"


class Leaf(NamedTuple):
    """A key of a configuration."""

    path: str  # with dots
    value: Any  # resolved; a plain value, or a list or dict
    refers: bool  # to another key, from which it has its value
    target: str | None  # whose parameter it is


def check_values(cfg: DictConfig, config_name: str | None) -> None:
    """Refuse the first value that its reader does not take.

    Args:
        cfg: composed; its keys have been checked.
        config_name: of the primary configuration.

    Raises:
        ValueError: names key and value, and what is legal.
        TypeError: likewise, of a strategy's own checks.
    """
    plain = OmegaConf.to_container(cfg, resolve=False)
    leaves = list(_leaves(plain, cfg))
    # first what was written, then what refers to it: the user is told of the key that is wrong
    for leaf in sorted(leaves, key=lambda leaf: leaf.refers):
        for legal in (_by_path(config_name, leaf.path), *_by_signature(leaf)):
            if legal is not None and (why := _why_not(leaf.value, legal)):
                reader = f" for {leaf.target}" if leaf.target else ""
                raise ValueError(
                    f"`{leaf.path}={json.dumps(leaf.value)}` is not legal{reader}: it {why}."
                )
    _check_backend(cfg.get("compile"))
    strategy = cfg.get("strategy")
    if strategy is not None:
        instantiate(strategy, _convert_="all")  # says what it refuses


def _leaves(plain: Any, cfg: DictConfig) -> Iterator[Leaf]:
    def walk(node: dict[Any, Any], path: str) -> Iterator[Leaf]:
        target = "peft.LoraConfig" if path == "lora." else node.get("_target_")
        for key, written in node.items():
            here = f"{path}{key}"
            if str(key).startswith("_") or written == _MISSING:
                continue
            refers = isinstance(written, str) and "${" in written
            if isinstance(written, dict):
                yield from walk(written, f"{here}.")
            try:
                value = OmegaConf.select(cfg, here)
            except OmegaConfBaseException:  # it refers to what is not given, which is told later
                continue
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=False)
            if not (isinstance(value, dict) and "_target_" in value):  # an object, made of its own
                yield Leaf(here, value, refers, target)

    yield from walk(plain, "")


def _by_path(config_name: str | None, path: str) -> Any:
    places = (path, f"{config_name}:{path}")
    found = (legal for place, legal in RANGES.items() if any(fnmatchcase(p, place) for p in places))
    return next(found, None)


def _by_signature(leaf: Leaf) -> Iterator[Any]:
    """Yield the type of the parameter that a value is for, if anybody has written it down."""
    if leaf.target is None:
        return
    found, name = get_object(leaf.target), leaf.path.rpartition(".")[2]
    if is_model_config(found):
        yield _of_a_config(found, name)
        return
    for function in constructors(found):
        try:
            parameter = inspect.signature(function).parameters.get(name)
        except ValueError:  # written in C
            return
        if parameter is not None:
            yield _hint(parameter.annotation, function)
            return


def _of_a_config(kind: type[PretrainedConfig], name: str) -> Any:
    """Return the type of one of transformers' settings; before release 5 its default's."""
    name = kind.attribute_map.get(name, name)
    default = getattr(kind(), name, None)
    for ancestor in kind.__mro__:
        if name in vars(ancestor).get("__annotations__", {}):
            written = _hint(vars(ancestor)["__annotations__"][name], ancestor)
            break
    else:
        written = (
            None if default is None else int | float if type(default) is float else type(default)
        )
    if type(default) is int and default > 0 and not name.endswith("_token_id"):
        return Annotated[written, Field(ge=1, le=10**9)]
    return written


def _hint(annotation: Any, of: Any) -> Any:
    if annotation is inspect.Parameter.empty:
        return None
    module = sys.modules.get(of.__module__)
    try:
        hints = SimpleNamespace(__annotations__={"it": annotation})
        return get_type_hints(hints, vars(module) if module else None, include_extras=True)["it"]
    except (NameError, TypeError, AttributeError):  # imported for type checkers only
        return None


def _why_not(value: Any, legal: Any) -> str | None:
    """Return why a value is not of a type, as the end of a sentence; None: it is."""
    try:
        adapter = TypeAdapter(legal, config=_ANY_CLASS)
        adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        reasons = [one["msg"].removeprefix("Input ") for one in error.errors()]
        return "; or it ".join(dict.fromkeys(reasons))
    except PydanticUserError:  # nothing that pydantic knows
        return None
    except SchemaError:  # a protocol, which has no `isinstance`
        return "should be described by a `_target_`"
    return None


def _check_backend(name: str | None) -> None:
    if name is None:
        return
    import torch.compiler  # dynamo takes seconds, which only those who use it shall wait for

    legal = torch.compiler.list_backends()
    if name not in legal:
        raise ValueError(f"`compile={name}` is no backend of torch. There are: {', '.join(legal)}.")
