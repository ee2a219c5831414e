"""Turn an error that the user can fix into one sentence."""

from __future__ import annotations

import re
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path

from hydra.errors import (
    CompactHydraException,
    ConfigCompositionException,
    InstantiationException,
    MissingConfigException,
)
from omegaconf import DictConfig
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from recipes.configuration.checking import nearest, unknown_key
from recipes.configuration.help import choices, groups
from recipes.configuration.signatures import parameters

_RAISED_IN_A_WORKER = "torch.multiprocessing.spawn.ProcessRaisedException"
_ENDS_OF_FITS = ("RuntimeError", "AgreedError", "PeerLostError")
_REFUSALS = ("ValueError", "TypeError", "OSError", "FileNotFoundError", "MisconfigurationException")

# a printed traceback: frames, each with its line, and at the end the error
_FRAME = re.compile(r'^ *File "(.+)", line \d+, in .+\n +(.+)$', re.M)
_ERROR = re.compile(r"^([\w.]+): (.+)", re.M | re.S)


def sentence(error: BaseException) -> str | None:
    """Return the message for the user; None if it may be a bug, which needs its traceback."""
    if isinstance(error, MissingConfigException):
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        options = list(error.options or choices(group))
        near = nearest(choice, options)
        meant = f" Did you mean {group}={near}?" if near else ""
        return f"`{group}={choice}` does not exist. There are: {', '.join(options)}.{meant}"
    if isinstance(error, ConfigCompositionException):
        return _unknown_key(error)
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        # where another library's constructor refuses a value, Hydra's text names the key
        kinds = {kind.__name__ for kind in type(error.__cause__).__mro__}
        refuses = not kinds.isdisjoint({*_REFUSALS, "ImportError"})
        return sentence(error.__cause__) or (str(error) if refuses else None)
    if isinstance(error, MissingMandatoryValue):
        key = error.full_key
        return f"`{key}` must be given: add {key}=... to the command line."
    if isinstance(error, CompactHydraException | OmegaConfBaseException):
        return str(error)
    module, _, name = _RAISED_IN_A_WORKER.rpartition(".")
    if module in sys.modules and isinstance(error, getattr(sys.modules[module], name)):
        return _refusal(str(error))  # the traceback that the worker printed
    return _refusal("".join(traceback.format_exception(error)))


def _unknown_key(error: ConfigCompositionException) -> str:
    """Return the sentence for an override of a key that is not in the configuration."""
    cause = error.__cause__
    section = getattr(cause, "parent_node", None)
    if not isinstance(cause, OmegaConfBaseException) or not isinstance(section, DictConfig):
        return "\n".join(str(e) for e in (error, cause) if e is not None)
    path, key = str(cause.full_key), str(cause.key)
    names = {str(name) for name in section} - {"_target_"}
    if path == key:  # at the root: a misspelt group, or a key without its section
        for name in names:
            child = section._get_node(name)  # resolves no interpolation: some cannot be resolved
            if isinstance(child, DictConfig) and not child._is_none() and key in child:
                return f"`{key}` is not a key of the configuration: did you mean `{name}.{key}`?"
        return unknown_key(path, names | set(groups()), "the configuration")
    parent = path.rpartition(".")[0]
    if parent in groups() and key in choices(parent):
        return f"`{path}` is not part of this configuration: select it by {parent}={key}."
    target = section.get("_target_")
    reader = target if isinstance(target, str) else f"`{parent}`"
    accepted = parameters(target)[0] if isinstance(target, str) else {}
    if key in accepted:
        return f"`{path}` has no value here; {target} accepts it: write +{path}=... to add it."
    return unknown_key(path, names | set(accepted), reader)


def _refusal(text: str) -> str | None:
    """Return the message of a printed traceback, if this project or Lightning raised it on purpose.

    That is, the last line that ran is a `raise` of theirs. Our `RuntimeError`s and their subclasses
    count too: they explain what ended a fit, such as a dead rank. Our own invariants are asserts,
    which do not.
    """
    frames = list(_FRAME.finditer(text))
    if not frames:
        return None
    filename, line = frames[-1].groups()
    last = _ERROR.search(text, frames[-1].end())
    if last is None or not line.startswith("raise "):
        return None
    kind = last[1].rpartition(".")[2]
    ours = (Path(__file__).parents[1], _folder("lightning_commfree"))
    speakers = ours if kind in _ENDS_OF_FITS else (*ours, _folder("lightning"))
    is_theirs = any(Path(filename).is_relative_to(folder) for folder in speakers)
    return last[2].strip() if is_theirs and kind in (*_REFUSALS, *_ENDS_OF_FITS) else None


def _folder(package: str) -> Path:
    spec = find_spec(package)  # does not import it
    assert spec is not None, f"{package} is installed"
    assert spec.origin is not None, f"{package} is not a namespace package"
    return Path(spec.origin).parent
