"""The rules of the house hold, and each test of a rule is shown to fail where one breaks it."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "lightning_commfree"
PLANNER = "commfree_planner"  # beside it: whoever asks for a plan does not wait for torch
CHANNEL = Path("comm/channel.py")
JOB = Path("comm/job.py")  # makes the framework's process group, and sends nothing
LIVENESS = Path("comm/liveness.py")  # reads and writes the store
FSDP = Path("layouts/fsdp.py")  # FSDP2, whose collectives are its own and stay in a replica
REPLICATION = Path("model/replication.py")  # FSDP's gradient scaler, on a channel's group
SHARDS = Path("model/shards.py")
FOLDERS = Path("resume/folders.py")  # a checkpoint that ranks have written
TCP_STORE = Path("stores/tcp.py")  # a client of torch's key-value store, and its server
USERS = [
    CHANNEL,
    JOB,
    LIVENESS,
    FSDP,
    REPLICATION,
    SHARDS,
    FOLDERS,
    TCP_STORE,
]  # of torch.distributed
LINT_IMPORTS = "import sys, importlinter.cli as cli; sys.exit(cli.lint_imports(no_cache=True))"


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def run_python(
    *args: str, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.fixture
def copy_of_the_house(tmp_path: Path) -> Path:
    """A folder with what the contracts speak of, for a test to break."""
    ignore = shutil.ignore_patterns("__pycache__", "*.xz", "*.png", "*.json", "*.md")
    for name in (PACKAGE, PLANNER, "recipes", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


# Import contracts


def test_import_contracts_are_kept() -> None:
    result = run_python("-c", LINT_IMPORTS, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


# file, import, beginning of the name of the contract that it breaks
DIRECT = [
    ("comm/ledger.py", "import lightning.pytorch", "the ground floor and the algorithms know"),
    ("diloco/schedule.py", "import pytorch_lightning", "the ground floor and the algorithms know"),
    ("comm/ledger.py", f"import {PACKAGE}.diloco.schedule", "imports run one way"),
    ("diloco/schedule.py", f"from {PACKAGE} import strategies", "imports run one way"),
    ("diloco/schedule.py", f"import {PACKAGE}.lion.vote", "imports run one way"),
    ("model/blocks.py", "import lightning", "the ground floor and the algorithms know"),
    ("model/blocks.py", f"import {PACKAGE}.lion", "imports run one way"),
    ("comm/ledger.py", f"import {PACKAGE}.model", "imports run one way"),
    ("stores/store.py", f"import {PACKAGE}.comm", "imports run one way"),
    ("resume/loops.py", f"import {PACKAGE}.lion.vote", "fit, resume and the door know no"),
    ("resume/loops.py", f"import {PACKAGE}.fit", "imports run one way"),
    ("fit/clock.py", f"import {PACKAGE}.layouts", "imports run one way"),
    ("fit/clock.py", f"import {PACKAGE}.diloco.codec", "fit, resume and the door know no"),
    ("diloco/schedule.py", f"import {PACKAGE}.fit.clock", "the ground floor and the algorithms"),
    ("layouts/fsdp.py", f"import {PACKAGE}.host", "the ground floor and the algorithms"),
    ("elastic/log.py", f"import {PACKAGE}.host", "the ground floor and the algorithms"),
    ("diloco/codec.py", f"import {PACKAGE}.elastic.log", "imports run one way"),
    ("lightning_internals.py", f"import {PACKAGE}.domino", "fit, resume and the door know no"),
    ("lightning_internals.py", f"import {PACKAGE}.resume", "imports run one way"),
    ("fit/clock.py", "import lightning.pytorch", "one module imports Lightning"),
    ("resume/loops.py", "import pytorch_lightning", "one module imports Lightning"),
    ("lightning_internals.py", "import lightning", "one module imports Lightning"),
    ("ray.py", "import lightning.pytorch", "one module imports Lightning"),
    ("strategies.py", f"import {PACKAGE}.ray", "imports run one way"),
    ("host.py", f"import {PACKAGE}.lightning_internals", "imports run one way"),
    ("comm/ledger.py", "import recipes.data", "the library imports neither"),
    (f"../{PLANNER}/job.py", f"import {PACKAGE}.comm", "the planner starts at once"),
    (f"../{PLANNER}/job.py", "import torch", "the planner starts at once"),
    ("lion/strategy.py", "import benchmarks.lab", "the library imports neither"),
    ("../recipes/compare.py", "import benchmarks.lab.netlab", "recipes use public names"),
    ("../recipes/plan.py", "import benchmarks.common.page", "recipes use public names"),
    ("../benchmarks/lab/nodes.py", "import recipes.data", "the laboratory stands alone"),
    ("../benchmarks/lab/nodes.py", "import benchmarks.common", "the laboratory stands alone"),
]
THROUGH_ANOTHER = [  # resume may import Lightning
    ("comm/ledger.py", f"import {PACKAGE}.resume", "the ground floor and the algorithms know"),
    ("model/blocks.py", f"import {PACKAGE}.resume", "the ground floor and the algorithms"),
]


def is_reported(file: str, line: str, broken: str, report: str) -> bool:
    """Whether a contract of that name is broken by that import, by the linter's report."""
    path = Path(os.path.normpath(f"{PACKAGE}/{file}")).with_suffix("")
    imported = re.sub(r"^from (.*) import (.*)$|^import (.*)$", r"\1.\2\3", line).lstrip(".")
    if imported.partition(".")[0] not in (PACKAGE, "recipes", "benchmarks"):
        imported = imported.partition(".")[0]
    step = f"{'.'.join(path.parts)} -> {imported} "
    _, *sections = re.split(r"\n\n(\S.*)\n-{9,}\n", report)
    return any(
        name.startswith(broken) and step in " ".join(text.split())
        for name, text in zip(sections[::2], sections[1::2], strict=True)
    )


@pytest.mark.parametrize("planted", [DIRECT, THROUGH_ANOTHER], ids=["direct", "through another"])
def test_every_forbidden_import_breaks_its_contract(
    copy_of_the_house: Path, planted: list[tuple[str, str, str]]
) -> None:
    """All at once, as the linter takes seconds; it names every import."""
    for file, line, _ in planted:
        with (copy_of_the_house / PACKAGE / file).open("a", encoding="utf-8") as source:
            source.write(f"\n{line}\n")
    result = run_python("-c", LINT_IMPORTS, cwd=copy_of_the_house)
    assert result.returncode == 1, result.stdout + result.stderr
    assert [case for case in planted if not is_reported(*case, result.stdout)] == [], result.stdout
    nobody_planted = ("comm/bits.py", "import lightning", "the ground floor")
    assert not is_reported(*nobody_planted, result.stdout)


def folders_outside_the_contracts(package: Path) -> list[str]:
    """Folders of the package that one of the contracts forgets; two may use Lightning."""
    contracts = pyproject()["tool"]["importlinter"]["contracts"]
    layers = [layer for contract in contracts for layer in contract.get("layers", ())]
    layered = {name.strip() for layer in layers for name in layer.split("|")}
    (no_lightning,) = (
        set(contract["source_modules"])
        for contract in contracts
        if f"{PACKAGE}.host" in contract.get("forbidden_modules", ())
    )
    lightning_free = no_lightning | {f"{PACKAGE}.{name}" for name in ("fit", "layouts", "resume")}
    folders = [f"{PACKAGE}.{init.parent.name}" for init in package.glob("*/__init__.py")]
    return [name for name in sorted(folders) if name not in layered & lightning_free]


def test_the_contracts_cover_every_folder(tmp_path: Path) -> None:
    assert folders_outside_the_contracts(ROOT / PACKAGE) == []

    (tmp_path / "new_wing").mkdir()
    (tmp_path / "new_wing" / "__init__.py").touch()
    assert folders_outside_the_contracts(tmp_path) == [f"{PACKAGE}.new_wing"]


# The tree


def folders_drawn(page: str) -> set[str]:
    """Folders in the tree of a page, by their indentation of two spaces."""
    drawing = re.search(r"^## Folders\n+```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert drawing is not None, "the page has no tree"
    found, parent = set(), ""
    for indentation, name in re.findall(r"^((?:  )?)(\w+)/(?=\s)", drawing[1], re.MULTILINE):
        parent = parent if indentation else name
        found.add(f"{parent}/{name}" if indentation else name)
    return found


def folders_there(root: Path) -> set[str]:
    """Folders of the repository: those at its root, and the packages in what is drawn in detail."""
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    top = (path.name for path in root.iterdir() if path.is_dir() and path.name[0] != ".")
    packages = (
        init.parent
        for name in (PACKAGE, "recipes", "benchmarks")
        for init in root.glob(f"{name}/*/*.py")
    )
    return {name for name in top if f"{name}/" not in ignored} | {
        path.relative_to(root).as_posix() for path in packages
    }


def test_the_tree_in_the_page_is_the_tree(tmp_path: Path) -> None:
    page = (ROOT / "docs/house.md").read_text(encoding="utf-8")
    assert folders_drawn(page) == folders_there(ROOT)
    assert folders_drawn(page.replace("\n  lion/", "\n  tiger/")) != folders_there(ROOT)

    for new in ("docs", f"{PACKAGE}/new_wing", "outputs"):
        (tmp_path / new).mkdir(parents=True)
        (tmp_path / new / "__init__.py").touch()
    assert folders_there(tmp_path) == {"docs", PACKAGE, f"{PACKAGE}/new_wing"}


# Where to look


def places_missing(page: str) -> set[str]:
    """Names that the table of places links to a file that does not define them."""
    section = re.search(r"^## Where to look\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    assert section is not None, "the page has no table of places"
    places = re.findall(r"\[`([\w.]+)`\]\(\.\./([\w/.]+\.py)\)", section[1])
    assert len(places) == section[1].count("](../")
    return {f"{name} in {file}" for name, file in places if name not in defined_in(ROOT / file)}


def defined_in(file: Path) -> set[str]:
    """Classes, methods, functions and constants of a module."""
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        match node:
            case ast.ClassDef():
                functions = (one for one in node.body if isinstance(one, ast.FunctionDef))
                found |= {node.name} | {f"{node.name}.{one.name}" for one in functions}
            case ast.FunctionDef():
                found.add(node.name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                found.add(name)
    return found


def test_the_places_in_the_page_exist() -> None:
    page = (ROOT / "docs/house.md").read_text(encoding="utf-8")
    assert places_missing(page) == set()
    moved = page.replace("[`Majority.count`]", "[`Majority.tally`]")
    assert places_missing(moved) == {"Majority.tally in lightning_commfree/lion/vote.py"}


# Who talks to other ranks


def modules_named_in(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names that a module imports or spells out, such as `torch.distributed`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def users_of_torch_distributed(package: Path) -> list[Path]:
    return [
        path.relative_to(package)
        for path in sorted(package.rglob("*.py"))
        if any(
            f"{name}.".startswith("torch.distributed.")
            for name in modules_named_in(ast.parse(path.read_text(encoding="utf-8")))
        )
    ]


def test_only_the_channel_calls_torch_distributed() -> None:
    """Bytes are counted where they leave, so there is one place where they leave."""
    assert users_of_torch_distributed(ROOT / PACKAGE) == USERS


@pytest.mark.parametrize(
    "line",
    [
        "import torch.distributed",
        "import torch.distributed as dist",
        "import torch.distributed.nn",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "from torch.distributed.nn.functional import all_gather",
        "import torch; torch.distributed.barrier()",
        "def late():\n    import torch.distributed as dist",
    ],
)
def test_another_user_of_torch_distributed_is_found(tmp_path: Path, line: str) -> None:
    (tmp_path / "planted.py").write_text(f"import torch\n{line}\n", encoding="utf-8")
    (tmp_path / "other.py").write_text("import torch.nn\n", encoding="utf-8")
    assert users_of_torch_distributed(tmp_path) == [Path("planted.py")]


# What an installation is


# `data_position` keeps numpy's random numbers
OPTIONAL = (
    "compiled.py",
    "data_position.py",
    "objects.py",
    "quantize_numba.py",
    "ray.py",
    "worker_numba.py",
)
# what the caller has: it passes a class of transformers, which brings the other one; its Trainer;
# or a torch for CUDA, which brings Triton
GIVEN = {
    "worker_triton.py": {"triton"},
    "meta_init.py": {"transformers", "safetensors"},
    "host.py": {"pytorch_lightning", "lightning_fabric"},
}


def undeclared_imports(package: Path) -> set[str]:
    """Top-level modules that the package imports and its dependencies do not name.

    Some files may import what an extra names besides, and do so only where that is installed; two
    import what their caller has.
    """
    project = pyproject()["project"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *extras["numba"], *extras["store"], *extras["ray"]]
    names = [Requirement(text).name.replace("-", "_") for text in texts]
    declared, optional = set(names[: len(project["dependencies"])]), set(names)
    return {
        f"{path.name}: {name}"
        for path in package.rglob("*.py")
        for name in imported_by(path)
        - (optional if path.name in OPTIONAL else declared)
        - GIVEN.get(path.name, set())
    }


def imported_by(path: Path) -> set[str]:
    names = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in modules_named_in(ast.Module([node], []))
    }
    return names - set(sys.stdlib_module_names) - {PACKAGE, PLANNER}


def test_every_import_is_of_a_declared_dependency(tmp_path: Path) -> None:
    assert undeclared_imports(ROOT / PACKAGE) == set()

    (tmp_path / "module.py").write_text("import os, torch, numba\nfrom recipes.data import Text\n")
    (tmp_path / "quantize_numba.py").write_text("import numba, numpy, pandas\n")
    found = {"module.py: numba", "module.py: recipes", "quantize_numba.py: pandas"}
    assert undeclared_imports(tmp_path) == found


# Lightning comes first and unwatched: what its own import writes (a font cache) is not ours.
WATCHED_IMPORT = f"""
import lightning.pytorch, os, sys, torch.distributed as dist
changes = os.O_WRONLY | os.O_RDWR | os.O_CREAT
def watch(event, args):
    if event == "open" and isinstance(args[2], int) and args[2] & changes:
        print("wrote", args[0])
def look():
    print("numba" in sys.modules, dist.is_initialized())
sys.addaudithook(watch)
import {PACKAGE}
look()
open("left_behind", "w").close()
import numba
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
look()
"""


def test_importing_the_package_writes_nothing_and_opens_no_process_group(tmp_path: Path) -> None:
    """In a fresh process, which then does what it must not, so that the watch is seen to work."""
    env = {"HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)}
    result = run_python("-c", WATCHED_IMPORT, cwd=tmp_path, env=env)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[:2] == ["False False", "wrote left_behind"]
    assert lines[-1] == "True True"


def test_the_wheel_holds_the_packages_and_nothing_else(tmp_path: Path) -> None:
    result = run_python(
        *("-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)),
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = {name for name in names if ".dist-info/" in name}
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in (PACKAGE, PLANNER)
        for path in (ROOT / package).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert {f"{PACKAGE}/py.typed", f"{PLANNER}/py.typed"} <= sources
    assert names - metadata == sources
    assert any(name.endswith("licenses/LICENSE") for name in metadata)


def test_the_tests_ask_no_hub() -> None:
    """It reads the environment once, when it is imported: nothing may import it before conftest."""
    assert huggingface_hub.constants.HF_HUB_OFFLINE
