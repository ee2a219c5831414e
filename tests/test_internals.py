"""Private names of Lightning are used behind the door alone: `lightning_internals.py`.

The syntax trees of what may import Lightning are walked. Comm and the wings do not know it, which
an import contract sees to.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_commfree import lightning_internals
from lightning_commfree.host import DDPStrategy, pl

PACKAGE = Path(lightning_internals.__file__).parent
DOOR = Path(lightning_internals.__file__)
ROOMS = ("strategies", "resume")  # beside the files of the package's root
NO_DOOR = (  # modules that Lightning does not document
    "lightning.pytorch.loops",
    "lightning.pytorch.strategies.launchers",
    "lightning.pytorch.trainer.call",
    "lightning.pytorch.trainer.connectors",
)
# private names of others than Lightning, and why there is no other way
OTHERS = {
    "_iterator": "of a torch loader, whose workers persist in it",
    "_get_iterator": "of a torch loader, with which it creates every iterator",
    "_asdict": "of a NamedTuple, public by its documentation",
    "_fields": "of a NamedTuple, public by its documentation",
    "_buffers": "of a torch module: the persistent flag of a buffer has no public name",
    "_get_layout": "of a torch checkpoint's folder",
    "_pickle_storage_type": "of torch's file format",
    "_untyped_storage": "of torch's file format",
    "_fork": "an ending of our strategies' names",
    "_spawn": "an ending of our strategies' names",
}


def sources() -> list[Path]:
    return [
        path
        for place in (PACKAGE, *(PACKAGE / room for room in ROOMS))
        for path in (place.glob("*.py") if place == PACKAGE else place.rglob("*.py"))
        if path != DOOR
    ]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def defined(tree: ast.AST) -> Iterator[str]:
    """Private names that a file gives to its own functions, classes, attributes and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and own(node):
            yield node.attr


def own(node: ast.Attribute) -> bool:
    """Whether it is an attribute of `self`, `cls` or `super()`."""
    of = node.value
    if isinstance(of, ast.Call):
        return isinstance(of.func, ast.Name) and of.func.id == "super"
    return isinstance(of, ast.Name) and of.id in ("self", "cls")


def lightnings_private_names() -> set[str]:
    """What the objects of Lightning that we meet call by private names, in this release."""
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    loop = trainer.fit_loop
    found = [trainer, loop, loop.epoch_loop, loop.epoch_loop.val_loop, DDPStrategy()]
    found += [trainer._data_connector, trainer._logger_connector, trainer._signal_connector]
    return {name for one in found for name in dir(one) if is_private(name)}


def findings(paths: list[Path], lightnings: set[str]) -> list[str]:
    """Uses of private names that are not our own, as "file:line: name".

    1. Imports of private modules or names of Lightning, and of modules that it does not document.
    2. Private attributes of `self` that no file of ours defines.
    3. Private attributes of anything else that no file of ours defines, or that Lightning has.
    4. Strings that are a private name no file of ours defines, as `getattr` takes them.
    """
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    ours = {name for tree in trees.values() for name in defined(tree)}
    found = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            for name in _foreign(node, ours, lightnings):
                found.append(f"{path.name}:{getattr(node, 'lineno', 0)}: {name}")
    return sorted(found)


def _foreign(node: ast.AST, ours: set[str], lightnings: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if _hidden(alias.name))
    elif isinstance(node, ast.ImportFrom) and node.module:
        full = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name for name in full if _hidden(name))
    elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in OTHERS:
        known = ours if own(node) else ours - lightnings
        if node.attr not in known:
            yield node.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
        if text.isidentifier() and is_private(text) and text not in ours | OTHERS.keys():
            yield text


def _hidden(name: str) -> bool:
    inside = name.split(".")
    if inside[0] not in ("lightning", "pytorch_lightning"):
        return False
    closed = any(f"{name}.".startswith(f"{module}.") for module in NO_DOOR)
    return closed or any(map(is_private, inside))


def test_private_names_of_lightning_are_used_behind_the_door_alone() -> None:
    assert findings(sources(), lightnings_private_names()) == []


def test_no_strategy_of_ours_takes_a_private_name_of_ddps() -> None:
    """One that both use would be Lightning's to change: `self._timeout`, `_configure_launcher`."""
    theirs = {name for name in dir(DDPStrategy()) if is_private(name)}
    for path in sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for kind in ast.walk(tree):
            if isinstance(kind, ast.ClassDef) and kind.name.endswith("Strategy"):
                assert not theirs & {*defined(kind)}, f"{kind.name} in {path.name}"


@pytest.mark.parametrize(
    "planted",
    [
        "from lightning.fabric.utilities.types import _PATH",
        "from lightning.pytorch.loops.fit_loop import RestartStage",
        "import lightning.pytorch.trainer.call as call",
        "import lightning.pytorch._graveyard",
        "def f(trainer):\n    return trainer._signal_connector",
        "def f(trainer):\n    trainer.fit_loop._restarting = True",
        "def f(trainer):\n    return getattr(trainer, '_val_check_time_interval', None)",
        "class A:\n    def f(self):\n        return self._timeout",
        "class A:\n    def f(self):\n        return super()._configure_launcher()",
        "class A:\n    _results = 0\ndef f(loop):\n    return loop._results",
    ],
)
def test_a_planted_private_name_is_found(planted: str, tmp_path: Path) -> None:
    file = tmp_path / "planted.py"
    file.write_text(planted, encoding="utf-8")
    assert findings([file], lightnings_private_names())
