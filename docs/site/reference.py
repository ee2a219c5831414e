"""Generate the API reference: what users call, and what they need for an algorithm of their own."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from logging import Logger
from pathlib import Path

import griffe

PACKAGE, PLANNER = "lightning_commfree", "commfree_planner"
STRATEGIES = (
    "StreamingDiLoCoStrategy",
    "ElasticDiLoCoStrategy",
    "DistributedLionStrategy",
    "DominoTPStrategy",
)
# Per page, what it shows of a module; the first page shows all that the package exports. The other
# names in the `__all__` of a package are for the library itself.
SHOWN = {
    # `methods.methods`, because a module has the name of the function
    PLANNER: (
        "Model",
        "Training",
        "Method",
        "methods.methods",
        "Advice",
        "advise",
        "Choice",
        "choose",
    ),
    "diloco": (
        "streaming_diloco",
        "Codec",
        "Int2Codec",
        "default_outer_optimizer",
        "OuterOptimizerFactory",
    ),
    "domino": ("DominoSettings",),
    "lion": ("distributed_lion",),
    "ray": (
        "RayStreamingDiLoCoStrategy",
        "RayDistributedLionStrategy",
        "RayDominoTPStrategy",
    ),
    "strategies": ("ReplicaStrategy", "LocalCopies", "DataParallel", "Traffic"),
}
# the interfaces for writing your own algorithm or layout
MODULES = ("comm.channel", "fit.contracts", "fit.fit", "model.weight_swap")
# Per class, the members that it shows, inherited ones too; all public members by default. The other
# members of a strategy are hooks that Lightning or the library calls.
_FOR_USERS = ("fragments", "outer_weights", "figures", "traffic", "grad_norm")
MEMBERS: dict[str, Sequence[str]] = {
    "DistributedLion": (),  # they are torch's, or called by its strategy
    "Method": (),
    "Model": (),
    # what a subclass implements or calls
    "ReplicaStrategy": (
        "begin",
        "fingerprint",
        "not_restored",
        "drift_check_plan",
        "module",
        "channels",
        "algorithm",
        "figures",
        "traffic",
        "grad_norm",
    ),
    "Training": ("utilization", "needed_gbit_per_s"),
    **dict.fromkeys(STRATEGIES, _FOR_USERS),
}


def exported(init: Path) -> list[str]:
    """Return the names in the `__all__` of a module."""
    for node in ast.parse(init.read_text("utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return list(ast.literal_eval(value))
    return []


def packages(root: Path) -> dict[str, list[str]]:
    """Return each package that exports names, and two modules that do, with those names."""
    found = {}
    inits = [*(root / PACKAGE).rglob("__init__.py"), *(root / PLANNER).rglob("__init__.py")]
    modules = [root / PACKAGE / "ray.py", root / PACKAGE / "strategies.py"]
    for file in sorted([*inits, *modules]):
        names = exported(file)
        if names:
            module = file.parent if file.name == "__init__.py" else file.with_suffix("")
            found[".".join(module.relative_to(root).parts)] = names
    return found


def pages(root: Path, log: Logger) -> Iterator[tuple[str, str]]:
    """Yield the path and Markdown of each page; warn about names without a docstring."""
    tree, planner = (griffe.load(name, search_paths=[root]) for name in (PACKAGE, PLANNER))
    for package, names in packages(root).items():
        short = package.removeprefix(f"{PACKAGE}.")
        module = {PACKAGE: tree, PLANNER: planner}.get(package) or tree[short]
        for name in names:
            if module[name].docstring is None:
                log.warning("the public name %s.%s has no docstring", package, name)
        if package == PACKAGE:
            names = [*STRATEGIES, *(name for name in names if name not in STRATEGIES)]
        if package in (PACKAGE, PLANNER) or short in SHOWN:
            yield f"api/{short}.md", page(package, module, SHOWN.get(short, names))
    for short in MODULES:
        yield f"api/{short}.md", page(f"{PACKAGE}.{short}", tree[short], public_in(tree[short]))


def public_in(module: griffe.Module) -> list[str]:
    """Return the public classes and functions that a module defines."""
    kinds = (griffe.Kind.CLASS, griffe.Kind.FUNCTION)
    own = (m for m in module.members.values() if not m.is_alias)
    return [m.name for m in own if m.name[0] != "_" and m.kind in kinds]


def page(package: str, module: griffe.Object | griffe.Alias, names: Sequence[str]) -> str:
    """Return a page: the module docstring, verbatim, and then its names."""
    said = module.docstring.value if module.docstring else ""
    title = f"# `{package}`\n\n"
    blocks = "\n".join(f"::: {package}.{name}\n{options(name)}" for name in names)
    return f"{title}````text\n{said}\n````\n\n{blocks}"


def options(name: str) -> str:
    """Return the options of mkdocstrings with which a class shows its `MEMBERS` only."""
    if name not in MEMBERS:
        return ""
    if not MEMBERS[name]:
        return "    options:\n      members: false\n"
    members = ", ".join(MEMBERS[name])
    return f"    options:\n      members: [{members}]\n      inherited_members: true\n"
