"""Initialize a model that was built on the `meta` device, layer by layer, while it is sharded.

1. A rank gives one layer its values: from a Hugging Face folder (`from_pretrained_on_meta`), by the
   model's own `_init_weights`, or by `reset_parameters`.
2. It keeps its shards of them and drops the rest.
3. It continues with the next layer.

So a rank never holds more than its shards of the model and one full layer, where `from_pretrained`
reads all of a model into every process. All ranks draw the same random numbers, for full layers, so
the values do not depend on the number of ranks. They differ from those of a model that is built
with values, which draws in another order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HEAD = 1 << 16  # bytes at a file's start, with names, shapes and offsets of its tensors


def from_pretrained_on_meta(
    model_class: Any, folder: str | Path, config: Any = None, **config_changes: Any
) -> Any:
    """Return a model without values, which a strategy reads from a folder when it shards it.

    Use it in place of `from_pretrained`, in `configure_model`, where ranks share a model:
    `inside="fsdp"`, `inside="domino"`, `DominoTPStrategy`. No rank ever holds more than its shards
    and one unit or layer.

    Args:
        model_class: of transformers, such as `AutoModelForCausalLM` or `LlamaForCausalLM`.
        folder: on every machine, as `save_pretrained` writes it (safetensors).
        config: of transformers, for the model; None: the folder's.
        **config_changes: other values for the folder's, such as `attention_dropout=0.1`; `dtype`
            is that of the parameters (default: the saved one).

    Raises:
        TypeError: both `config` and `config_changes` are given.
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
    """The tensors of a Hugging Face folder, by the names of a model.

    Args:
        folder: with one file of safetensors, or several and their index.

    Raises:
        ValueError: the folder has none.
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
        """Check that the folder has a tensor for every parameter of a model.

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
        """Return the name of a tensor in the folder, None if the folder lacks it.

        Args:
            model: has the tensor.
            names: of the tensor in the model; a tied one has several. The folder may have been
                saved by a model with another head, or none.
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
        """Return a hash that differs between models: of the sizes and heads of the files."""
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


def described(module: nn.Module) -> dict[str, str]:
    """Return what must be the same on all ranks before they give a model values."""
    folders = [getattr(child, "saved_weights", None) for child in module.modules()]
    saved = [folder.fingerprint() for folder in folders if folder is not None]
    found = {"a model on the meta device": str(bool(on_meta(module)))}
    return {**found, "the folder of its weights": " ".join(saved)} if saved else found


def on_meta(module: nn.Module) -> list[str]:
    """Return the names of parameters and buffers without values."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in named if tensor.is_meta]


class Materializer:
    """Gives values to one model, layer by layer.

    Args:
        model: of transformers, which gets its values by `_init_weights` or from the folder of
            `from_pretrained_on_meta`; or a module around such models, whose other layers have a
            `reset_parameters`, as torch's do.
        seed: of the values, the same on all ranks.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model: Any = model
        self._owners: dict[nn.Module, Any] = {}
        for child in model.modules():
            if hasattr(child, "_init_weights") and child not in self._owners:
                self._owners |= dict.fromkeys(child.modules(), child)
        # a stream of its own: the values do not depend on what the user's code draws
        self._random = torch.Generator().manual_seed(seed).get_state()
        self._saved: dict[Tensor, tuple[SavedWeights, str]] = {}
        for child in model.modules():
            saved: Any = getattr(child, "saved_weights", None)
            for tensor, names in names_of(child).items() if saved is not None else ():
                name = saved.find(child, names)
                if name is not None and tensor.is_meta:
                    self._saved[tensor] = saved, name

    @property
    def reads(self) -> bool:
        """Whether some values are read from a folder."""
        return bool(self._saved)

    def materialize(self, layer: nn.Module) -> None:
        """Give values, in CPU memory, to all tensors of `layer` and below that have none.

        Raises:
            ValueError: the model's `_init_weights` skips one.
        """
        self._give_values(list(_children_first(layer)))

    def materialize_rest(self) -> None:
        """Give values to the rest of the model."""
        for module in _children_first(self._model):
            self._give_values([module])

    @torch.no_grad()
    def _give_values(self, modules: list[nn.Module]) -> None:
        made = [(module, *both) for module in modules for both in _make_room(module)]
        drawn = [(module, new) for module, old, new in made if old not in self._saved]
        if drawn:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self._random)
                for module in modules:
                    self._draw(module)
                self._random = torch.get_rng_state()
        for (
            _,
            old,
            new,
        ) in made:  # last: drawing overwrites the values of a layer's children
            if old in self._saved:
                saved, name = self._saved[old]
                new.copy_(saved.read(name))

        left = [type(module).__name__ for module, new in drawn if bool(new.isnan().any())]
        if left:
            raise ValueError(
                f"`{type(self._model).__name__}` is on the meta device, and its `_init_weights`"
                f" gives no values to all of `{left[0]}`. Build the model on the CPU."
            )

    def _draw(self, module: nn.Module) -> None:
        owner: Any = self._owners.get(module)
        reset: Any = getattr(module, "reset_parameters", None)
        if owner is not None:
            owner._init_weights(module)
        elif reset is not None:
            reset()


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _make_room(module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Replace a module's own tensors on `meta` by NaN; return the old and the new ones."""
    made: list[tuple[Tensor, Tensor]] = []
    own: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for tensors in own:
        for name, old in tensors.items():
            if old is None or not old.is_meta:
                continue
            if not old.is_floating_point():
                raise ValueError(
                    f"The buffer '{name}' of `{type(module).__name__}` is on the meta device and"
                    " holds no numbers that could be drawn. Build the model on the CPU, or use a"
                    " newer transformers."
                )

            new = torch.full_like(old, float("nan"), device="cpu")
            if isinstance(old, nn.Parameter):
                tensors[name] = nn.Parameter(new, requires_grad=old.requires_grad)
            else:
                tensors[name] = new
            made.append((old, new))
    return made
