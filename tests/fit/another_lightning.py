"""Lightning as a later release may be: with a name that is another one throughout it.

Only in a forked process: what is changed is not changed back.
"""

from __future__ import annotations

import gc
import sys
from types import CodeType, FunctionType, ModuleType
from typing import Any

NEW = "renamed_in_another_release_"  # and the old name


class Inside:
    """The functions, classes and modules of Lightning; finding them takes a second."""

    def __init__(self) -> None:
        gc.unfreeze()  # `conftest` keeps what was imported away from the collector
        found = [one for one in gc.get_objects() if _is_lightnings(one)]
        self.functions = [one for one in found if isinstance(one, FunctionType)]
        self.spaces = [one for one in found if not isinstance(one, FunctionType)]
        gc.freeze()

    def rename(self, name: str) -> None:
        """Give `name` another one, where it is defined and wherever it is used."""
        for function in self.functions:
            code = _renamed(function.__code__, name)
            if code is not function.__code__:
                function.__code__ = code
        for space in self.spaces:
            if name in vars(space):
                value = vars(space)[name]
                setattr(space, NEW + name, value)
                delattr(space, name)


def forget_ours() -> None:
    """Let the package, and tests that import it, be imported again."""
    for name in [*sys.modules]:
        if name.startswith(("lightning_commfree", "tests.fit")):
            del sys.modules[name]


def _is_lightnings(one: Any) -> bool:
    kind = type(one)  # isinstance would ask a weak proxy's object, which may be gone
    if issubclass(kind, ModuleType):
        return one.__name__.split(".")[0] == "lightning"
    module = getattr(one, "__module__", None) if issubclass(kind, type | FunctionType) else None
    return isinstance(module, str) and module.split(".")[0] == "lightning"


def _renamed(code: CodeType, name: str) -> CodeType:
    inner = tuple(_renamed(c, name) if isinstance(c, CodeType) else c for c in code.co_consts)
    names = tuple(NEW + name if known == name else known for known in code.co_names)
    if names == code.co_names and all(a is b for a, b in zip(inner, code.co_consts, strict=True)):
        return code
    return code.replace(co_names=names, co_consts=inner)
