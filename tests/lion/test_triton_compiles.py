"""The Triton kernels compile for a GPU, on a machine without one.

Triton's interpreter (`test_worker_triton`) runs kernels that its compiler refuses: it looks at no
annotation, for one. Without Triton, the first test reads the names that the kernels use.
"""

from __future__ import annotations

import ast
import builtins
import os
import re
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_commfree
from lightning_commfree.lion import worker
from lightning_commfree.lion.vote import Average, Majority, Rule
from tests.lion.test_worker_numba import outcome

MODULE = "lightning_commfree.lion.worker_triton"
PACKAGE = Path(lightning_commfree.__file__).parent


def forbidden_names(source: str) -> set[str]:
    """Names that a kernel's arguments or body use, and that Triton's compiler may not look up.

    It knows arguments, variables, builtins, other kernels and modules. What a module holds is not
    looked at.
    """
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    kernels = [f for f in functions if any("jit" in ast.unparse(d) for d in f.decorator_list)]
    modules = {
        (alias.asname or alias.name).split(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    found = set()
    for kernel in kernels:
        parts = [node for top in (kernel.args, *kernel.body) for node in ast.walk(top)]
        names = [node for node in parts if isinstance(node, ast.Name)]
        known = {node.arg for node in parts if isinstance(node, ast.arg)} | modules
        known |= {n.id for n in names if isinstance(n.ctx, ast.Store)} | {k.name for k in kernels}
        found |= {name.id for name in names} - known - set(dir(builtins))
    return found


def test_kernels_use_no_name_that_triton_forbids() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    kernels = {path: source for path, source in sources.items() if "import triton" in source}
    assert kernels
    for path, source in kernels.items():
        assert "@jit" in source
        assert forbidden_names(source) == set(), path


def test_forbidden_names_are_found() -> None:
    """`Any` was one: no kernel compiled, and torch operations ran instead."""
    source = """
import triton.language as tl
from typing import Any
SIZE = 8

@jit
def kernel(values: Any, numel: tl.tensor, BLOCK: tl.constexpr) -> None:
    place = tl.arange(0, BLOCK) + len(SIZE)
    tl.store(values + place, place < numel)
"""
    assert forbidden_names(source) == {"Any", "SIZE"}


class Driver:
    """What the compiler asks of a driver: compute capability 9.0, as an H100 has it."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


class Compiled:
    """The kernels' module; a launch compiles, and launches nothing.

    Attributes:
        module: a new one, whose kernels have never been compiled.
        ptx: what was compiled, by the name of the kernel and what it is specialized for.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        patch.setattr(driver, "_active", Driver())
        patch.setattr(JITFunction, "__getitem__", lambda *given: self._launcher(*given))
        patch.delitem(sys.modules, MODULE, raising=False)
        self.module = import_module(MODULE)
        self.ptx: dict[tuple[str, str], str] = {}

    def _launcher(self, kernel: Any, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            made = kernel.warmup(*arguments, grid=grid, **options)
            source = made.src
            special = f"{source.signature} {source.constants} {source.attrs}"
            self.ptx[kernel.__name__, special] = made.asm["ptx"]

        return launch


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty folder in which a kernel that another test has compiled is found again."""
    return tmp_path_factory.mktemp("triton")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Compiled:
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed: nothing was compiled")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1: Triton interprets, nothing was compiled")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    return Compiled(monkeypatch)


KERNELS = {"_cast_kernel", "_update_values_kernel", "_update_momentum_kernel"}
RULES: tuple[tuple[Rule, int], ...] = ((Majority(), 3), (Average(), 3), (Average(), 64))
IN_TRITON = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


@pytest.mark.parametrize("dtype", IN_TRITON, ids=str)
def test_whole_steps_compile(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """All variants of the parameters that `test_worker_triton` interprets.

    A variant depends on dtypes, and on which numbers are 1 or divisible by 16.
    """
    monkeypatch.setattr(worker, "_loops", lambda momentum: compiled.module)
    for rule, workers in RULES:
        for zeros in (False, True):
            outcome(dtype, rule, workers, zeros)
    # the values of master copies
    follows = {"_follow_kernel"} if dtype == torch.bfloat16 else set()
    assert {name for name, _ in compiled.ptx} == KERNELS | follows
    assert len(compiled.ptx) >= 20
    for (name, special), ptx in compiled.ptx.items():
        if name == "_follow_kernel":
            assert f"'values': '{IN_TRITON[dtype]}'" in special
            continue
        assert name == "_update_values_kernel" or f"'gradient': '{IN_TRITON[dtype]}'" in special, (
            "gradients are read as they are, without a copy in fp32"
        )
        assert_rounds_every_operation(ptx)


def assert_rounds_every_operation(ptx: str) -> None:
    assert ".target sm_90" in ptx
    assert re.search(r"mul\.(rn\.)?f32", ptx)
    assert not re.search(r"\bfma\.|\bmad\.f32|\.ftz|div\.(approx|full)", ptx)


# Values in a bucket come from anywhere: a gradient may be a view into a bucket of DDP, and numbers
# of more than 31 bits are other types.
PLACES = {
    "aligned": (0, 4096, 0),
    "unaligned": (1, 4095, 7),
    "first": (1, 1, 1),
    "beyond 31 bits": (0, 4096, 2**31 + 5),
}


@pytest.mark.parametrize("dtype", IN_TRITON, ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_values_compile_wherever_they_are(
    compiled: Compiled, place: str, dtype: torch.dtype
) -> None:
    offset, numel, start = PLACES[place]
    found = torch.zeros(2, 2, dtype=torch.int64)

    def values(dtype: torch.dtype) -> Tensor:
        return torch.zeros(offset + numel, dtype=dtype)[offset:]

    for row_bytes in (24, 4096):
        planes = torch.zeros(2, row_bytes, dtype=torch.uint8)
        tensors = values(torch.float32), values(dtype)
        compiled.module.cast(*tensors, 0.9, planes, start, found[0, :1], found[1, :1])
        compiled.module.update_momentum(*tensors, 0.99)
        for weights, divisor in (((2,), 1), ((2, 1), 1), ((2, 4, 8), 3), ((1, 2, 4, 8), 16)):
            compiled.module.update_values(tensors[0], planes, weights, divisor, start, 0.9, 0.1)
    assert {name for name, _ in compiled.ptx} == KERNELS
    for ptx in compiled.ptx.values():
        assert_rounds_every_operation(ptx)


def test_a_fused_operation_is_seen(compiled: Compiled) -> None:
    m, g = torch.zeros(2, 64)
    kernel = compiled.module._update_momentum_kernel
    kernel[(1,)](m, g, 64, 0.9, 0.1, BLOCK=64, enable_fp_fusion=True)
    with pytest.raises(AssertionError):
        assert_rounds_every_operation(*compiled.ptx.values())
