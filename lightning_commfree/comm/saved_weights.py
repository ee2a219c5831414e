"""A model on the `meta` device whose values lie in a Hugging Face folder.

`from_pretrained` reads all of a model into every process. Here nothing is read until a strategy
divides the model, and then one layer after another (`materialize`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HEAD = 1 << 16  # bytes of a file in which names, shapes and places of its tensors begin


def from_pretrained_on_meta(
    model_class: Any, folder: str | Path, config: Any = None, **config_changes: Any
) -> Any:
    """Return a model without values, which a strategy reads from a folder when it divides it.

    In place of `from_pretrained`, in `configure_model`, where ranks share a model:
    `inside="fsdp"`, `inside="domino"`, `DominoTPStrategy`. No rank ever holds more than its part
    and one unit or layer.

    Args:
        model_class: of transformers, such as `AutoModelForCausalLM` or `LlamaForCausalLM`.
        folder: on every machine, as `save_pretrained` writes it (safetensors).
        config: of transformers, for the model; None: the folder's.
        **config_changes: other values for the folder's, such as `attention_dropout=0.1`; `dtype`
            is that of the parameters (default: the saved one).

    Raises:
        TypeError: `config` and changes of it are given.
        ValueError: the folder has no safetensors, or not a tensor for every parameter.
    """
    from transformers import AutoConfig

    saved = SavedWeights(folder)
    if config is None:
        config = AutoConfig.from_pretrained(folder, **config_changes)
    elif config_changes:
        names = ", ".join(config_changes)
        raise TypeError(f"`config` was given, and {names} to change the folder's: give one.")
    make = getattr(model_class, "from_config", None) or model_class._from_config
    with torch.device("meta"):
        model = make(config)
    saved.check(model)
    model.saved_weights = saved
    return model


class SavedWeights:
    """The tensors of a folder, by the names of a model.

    Args:
        folder: with one file of safetensors, or several and their index.

    Raises:
        ValueError: it has none.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        one, index = self._folder / _ONE, self._folder / _INDEX
        if index.is_file():
            files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif one.is_file():
            with _opened(one) as file:
                files = dict.fromkeys(file.keys(), _ONE)
        else:
            raise ValueError(
                f"{str(folder)!r} has neither '{_ONE}' nor '{_INDEX}'. Give a folder on this"
                " machine as `save_pretrained` writes it; `huggingface_hub.snapshot_download`"
                " returns one."
            )
        self._files = files

    def check(self, model: Any) -> None:
        """See that the folder has a tensor for every parameter of a model.

        Raises:
            ValueError: it lacks one.
        """
        lacking = [names[0] for names in names_of(model).values() if not self.find(model, names)]
        if lacking:
            more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
            raise ValueError(
                f"{str(self._folder)!r} has no tensor named {', '.join(map(repr, lacking[:3]))}"
                f"{more} for `{type(model).__name__}`. It was saved by another class, or"
                " transformers renames its tensors when it reads them: load it by"
                " `from_pretrained`, and save it again by `save_pretrained`."
            )

    def find(self, model: Any, names: Iterable[str]) -> str | None:
        """Return the name in the folder of a tensor; None: it is not there.

        Args:
            model: whose tensor it is.
            names: all that it has in the model. The folder may have been saved by a model with
                another head, or none.
        """
        base = f"{getattr(model, 'base_model_prefix', '')}."
        for name in names:
            for known in (name, name.removeprefix(base), base + name):
                if known in self._files:
                    return known
        return None

    def read(self, name: str) -> Tensor:
        """Return the tensor of that name in the folder, in host memory."""
        with _opened(self._folder / self._files[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def fingerprint(self) -> str:
        """Return what tells folders of other models apart: sizes of files, and how they begin."""
        found = blake2b(digest_size=8)
        for name in sorted(set(self._files.values())):
            path = self._folder / name
            with path.open("rb") as file:
                found.update(f"{name} {path.stat().st_size} ".encode() + file.read(_HEAD))
        return found.hexdigest()


def names_of(model: nn.Module) -> dict[Tensor, list[str]]:
    """Return all names of every parameter and persistent buffer: a tied one has several."""
    found: dict[Tensor, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            found.setdefault(tensor, []).append(name)
    return found


def _opened(path: Path) -> Any:
    from safetensors import safe_open  # transformers brings it

    return safe_open(path, framework="pt")
