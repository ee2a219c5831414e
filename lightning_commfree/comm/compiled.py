"""Compile CPU loops with numba and load GPU kernels written in Triton.

Both are faster than torch operations and give the same results. The loops need numba (`pip install
numba`). Importing numba takes a second. The first call of a loop takes another second, unless numba
finds the compiled loop in its cache, which is next to the loop's file if that folder is writable,
and otherwise in the user's cache folder. The cache is invalidated when the loop's file changes, but
not when other files do, so loops take constants from other files as arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_log = logging.getLogger(__name__)
_MAX_ERROR = 400  # characters of an error in a log message


def compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that compiles a loop with numba on its first call.

    The compiled loop releases the GIL. It is cached on disk if there is a writable cache folder.
    """
    import numba

    result: Callable[..., Any]
    try:
        result = numba.njit(nogil=True, error_model="numpy", cache=True)(loop)
    except RuntimeError:  # no writable folder for the cache
        result = numba.njit(nogil=True, error_model="numpy")(loop)
    return result


@cache
def load_loops(module: str, users: str) -> ModuleType | None:
    """Import a module of numba loops and try each loop once; if that fails, log why, return None.

    The module's `try_out` must call every loop. `users` is the plural noun in the log message for
    the code that then uses torch operations instead.
    """
    slower = f"{users} use torch operations on a CPU, which are slower (same results)"
    try:
        import numba

        if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]  # created at run time
            # interpreted loops would take minutes
            raise RuntimeError("NUMBA_DISABLE_JIT is set")
        loops = import_module(module)
        loops.try_out()
    except Exception as error:  # noqa: BLE001 - numba is only an optimization: its failure must not end a fit
        if isinstance(error, ModuleNotFoundError) and error.name == "numba":
            how = "pip install numba"
            _log.info("numba is not installed (%s): %s.", how, slower)
        else:  # an unsupported numpy, a library that cannot be loaded, a damaged cache
            text = "numba cannot be used (%s: %s): %s. If its cache in %s is corrupted, delete it."
            folder = Path(__file__).parents[1].joinpath(*module.split(".")[1:-1], "__pycache__")
            _log.warning(text, type(error).__name__, error, slower, folder)
        return None
    return loops


@cache
def load_kernels(module: str, users: str) -> ModuleType | None:
    """Import a module of Triton kernels and test them on a GPU; else log why, return None.

    The module's `try_out` must compare each kernel with torch; for `users`, see `load_loops`.
    Without a CUDA device, return None and log nothing.
    """
    if not torch.cuda.is_available():
        return None
    try:
        kernels = import_module(module)
        kernels.try_out()
    except Exception as error:  # noqa: BLE001 - as above
        if isinstance(error, ModuleNotFoundError) and error.name == "triton":
            why = "Triton is not installed (pip install triton)"
        else:
            # an error of the compiler shows the kernel's source, over many lines
            text = " ".join(str(error).split())
            why = f"Triton cannot be used ({type(error).__name__}: {text[:_MAX_ERROR]})"
        _log.warning(
            "%s are slower on this GPU than they could be: they use torch operations, which read"
            " and write several times as much memory (same results), because %s.",
            users,
            why,
        )
        return None
    return kernels
