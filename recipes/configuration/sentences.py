"""What to tell the user of an error: a sentence where it is theirs to repair."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.errors import (
    CompactHydraException,
    ConfigCompositionException,
    InstantiationException,
    MissingConfigException,
)
from omegaconf import DictConfig
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from recipes.configuration.keys import choices, groups, nearest, parameters_of, unknown_key

# kinds of errors that are raised to refuse what came
_REFUSALS: tuple[type[Exception], ...] = (ValueError, TypeError, OSError)
_LIGHTNINGS_REFUSAL = "lightning.fabric.utilities.exceptions.MisconfigurationException"
_RAISED_IN_A_WORKER = "torch.multiprocessing.spawn.ProcessRaisedException"
_REFUSAL_NAMES = (
    "ValueError",
    "TypeError",
    "FileNotFoundError",
    "OSError",
    "MisconfigurationException",
)


def _folder(package: str) -> Path:
    """Return where a package lies, without importing it."""
    spec = find_spec(package)
    assert spec is not None, f"{package} is installed"
    assert spec.origin is not None, f"{package} is no namespace"
    return Path(spec.origin).parent


_OURS = (Path(__file__).parents[1], _folder("lightning_commfree"))
_SPEAKERS = (*_OURS, _folder("lightning"))
# of a printed traceback: a frame with its line, and the error at the end
_FRAME = re.compile(r'^ *File "(.+)", line \d+, in .+\n +(.+)$', re.M)
_ERROR = re.compile(r"^([\w.]+): (.+)", re.M | re.S)


def sentence(error: BaseException) -> str | None:
    """Return what to tell the user of an error; None where it may be a bug: show its traceback."""
    if isinstance(error, MissingConfigException):
        return _unknown_choice(error)
    if isinstance(error, ConfigCompositionException):
        return _composition(error)
    if isinstance(error, InstantiationException):
        return _instantiation(error)
    if isinstance(error, MissingMandatoryValue):
        key = error.full_key
        return f"`{key}` must be given: add {key}=... to the command line."
    if isinstance(error, CompactHydraException | OmegaConfBaseException):
        return str(error)
    if _is(error, _RAISED_IN_A_WORKER):
        return _of_a_worker(str(error))
    ends_the_fit = isinstance(error, RuntimeError) and _is_refusal(error, _OURS)
    refuses = isinstance(error, _REFUSALS) or _is(error, _LIGHTNINGS_REFUSAL)
    if ends_the_fit or (refuses and _is_refusal(error)):
        return str(error)
    return None


def _is(error: BaseException, kind: str) -> bool:
    """Return whether an error is of a kind, whose library is loaded if so: it is not loaded here.

    Args:
        error: any.
        kind: module and name of a class.
    """
    module, _, name = kind.rpartition(".")
    return module in sys.modules and isinstance(error, getattr(sys.modules[module], name))


def _unknown_choice(error: MissingConfigException) -> str:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    options = list(error.options or choices(group))
    if not options:
        return str(error)
    near = nearest(choice, options)
    meant = f" Did you mean {group}={near}?" if near else ""
    return f"`{group}={choice}` is no choice. There are: {', '.join(options)}.{meant}"


def _composition(error: ConfigCompositionException) -> str:
    cause = error.__cause__
    parent = getattr(cause, "parent_node", None)
    if not isinstance(cause, OmegaConfBaseException) or not isinstance(parent, DictConfig):
        return "\n".join(str(e) for e in (error, cause) if e is not None)
    full_key, key = str(cause.full_key), str(cause.key)
    legal = {str(name) for name in parent}
    if full_key == key:  # at the root: a group, or a key without what stands before it
        return unknown_key(full_key, legal | set(groups()), "the configuration", _paths(parent))
    target = parent.get("_target_")
    if not isinstance(target, str):
        return unknown_key(full_key, legal, f"`{full_key.rpartition('.')[0]}`")
    parameters = parameters_of(target) or set()
    if key in parameters:
        return (
            f"`{full_key}` has no value here; {target} takes it: write +{full_key}=... to add it."
        )
    return unknown_key(full_key, (legal | parameters) - {"_target_"}, target)


def _paths(node: Any, before: str = "") -> list[str]:
    """Return the full keys of all values."""
    if not isinstance(node, DictConfig):
        return [before]
    # `_get_node` leaves interpolations alone, of which some cannot be resolved here
    return [
        path
        for key in map(str, node)
        for path in _paths(node._get_node(key), f"{before}.{key}" if before else key)
    ]


def _instantiation(error: InstantiationException) -> str | None:
    cause = error.__cause__
    told = None if cause is None else sentence(cause)
    if told is not None:
        return told
    # what a constructor of another library has refused: Hydra's text names the key
    refuses = isinstance(cause, (*_REFUSALS, ImportError)) or (
        cause is not None and _is(cause, _LIGHTNINGS_REFUSAL)
    )
    return str(error) if cause is None or refuses else None


def _is_refusal(error: BaseException, speakers: Sequence[Path] = _SPEAKERS) -> bool:
    """Tell a line `raise ...` of ours or of Lightning's from what Python or a library below says.

    `ValueError` and `TypeError` are raised here for the user alone, and our `RuntimeError`s tell
    what has ended a fit (a rank that is gone, NaN); our own invariants are asserts.
    """
    [*_, frame] = traceback.extract_tb(error.__traceback__) or [None]
    return frame is not None and _refuses(frame.filename, frame.line or "", speakers)


def _refuses(filename: str, line: str, speakers: Sequence[Path] = _SPEAKERS) -> bool:
    theirs = any(Path(filename).is_relative_to(folder) for folder in speakers)
    return theirs and line.startswith("raise ")


def _of_a_worker(text: str) -> str | None:
    """Return the sentence in the printed traceback of a forked or spawned process, if it is one."""
    frames = list(_FRAME.finditer(text))
    if not frames:
        return None
    filename, line = frames[-1].groups()
    last = _ERROR.search(text, frames[-1].end())
    kind = "" if last is None else last[1].rpartition(".")[2]
    speakers = _OURS if kind == "RuntimeError" else _SPEAKERS if kind in _REFUSAL_NAMES else ()
    return last[2].strip() if last is not None and _refuses(filename, line, speakers) else None
