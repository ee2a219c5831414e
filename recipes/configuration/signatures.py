"""Models of sections with a `_target_`, made from the signatures of their targets.

So the parameters and annotations of a strategy, a data module or an optimizer are its legal keys
and types, and nobody has to write them twice.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any, get_type_hints

from hydra.utils import get_object
from pydantic import NonNegativeFloat, PositiveInt, create_model
from pydantic.errors import PydanticUserError
from pydantic_core import SchemaError

from recipes.configuration.ranges import Fraction
from recipes.configuration.schema import RANGES, Open, Section


def target_model(target: str, keys: Iterable[str]) -> type[Section]:
    """Return a model of those keys of a section that the section's `_target_` accepts."""
    types, accepts_any = parameters(target)
    fields: dict[str, Any] = {key: (types[key], ...) for key in keys if key in types}
    base = Open if accepts_any else Section
    try:
        return create_model(target, __base__=base, **fields)
    except (PydanticUserError, SchemaError):  # an annotation that pydantic cannot check
        untyped: dict[str, Any] = dict.fromkeys(fields, (Any, ...))
        return create_model(target, __base__=base, **untyped)


@cache
def parameters(target: str) -> tuple[dict[str, Any], bool]:
    """Return a target's keyword parameters with their types, and whether it accepts any others."""
    found = get_object(target)
    # whoever names such a target has imported transformers, which takes half a second
    base = getattr(sys.modules.get("transformers"), "PretrainedConfig", None)
    if base is not None and isinstance(found, type) and issubclass(found, base):
        return _config_attributes(found), False
    types = dict(RANGES.get(target, {}))
    for function in _constructors(found):
        try:
            signature = inspect.signature(function).parameters.values()
        except ValueError:  # written in C
            return types, True
        for parameter in signature:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                types.setdefault(parameter.name, _hint(parameter.annotation, function))
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature):
            types.pop("self", None)
            return types, False
    return types, True


def _constructors(found: Any) -> Iterator[Any]:
    """Yield the functions that read a target's keywords: `**kwargs` go to the base class."""
    if not isinstance(found, type):
        yield found
        return
    for ancestor in found.__mro__:
        if "__init__" in vars(ancestor):
            yield ancestor.__init__  # type: ignore[misc]
        if ancestor.__name__ == "DDPStrategy":
            # it stores its `**kwargs` unread until the model is wrapped
            yield get_object("torch.nn.parallel.DistributedDataParallel")


def _hint(annotation: Any, function: Any) -> Any:
    module = sys.modules.get(function.__module__)
    holder = SimpleNamespace(__annotations__={"it": annotation})
    try:
        hint = get_type_hints(holder, vars(module) if module else None, include_extras=True)["it"]
    except (NameError, TypeError, AttributeError):  # imported for type checkers only
        return Any
    return Any if hint is inspect.Parameter.empty else hint


def _config_attributes(config_class: Any) -> dict[str, Any]:
    """Return the attributes of a config of transformers, typed as their default values are.

    Its constructor stores any keyword, so a misspelt one would have no effect.
    """
    types = {name: _like(name, default) for name, default in config_class().to_dict().items()}
    aliases = config_class.attribute_map  # such as hidden_size for GPT-2's n_embd
    return {**types, **{alias: types.get(name, Any) for alias, name in aliases.items()}}


def _like(name: str, default: Any) -> Any:
    if type(default) is int and default > 0 and not name.endswith("_token_id"):
        return PositiveInt
    if type(default) is float:
        return Fraction if "drop" in name else NonNegativeFloat
    return type(default) if isinstance(default, bool | str) else Any
