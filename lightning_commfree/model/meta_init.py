"""Initialize a model that was built on the `meta` device, layer by layer, while sharding it.

A rank initializes one layer, keeps its shards of that layer, discards the rest and continues with
the next layer. It never holds more than its shards of the model and one full layer, whereas
`from_pretrained` reads the full model in every process. The initial values come from a Hugging Face
folder (`from_pretrained_on_meta`), the model's own `_init_weights`, or `reset_parameters`.

All ranks start from the same RNG state and initialize full layers, so initial values do not depend
on the number of ranks. They differ from the values of a model that is not built on `meta`, because
its layers are initialized in a different order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_commfree.model.replication import persistent_buffers

_SINGLE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HEADER_BYTES = 1 << 16  # at the start of a file: the names, shapes and offsets of its tensors


def from_pretrained_on_meta(
    model_class: Any, folder: str | Path, config: Any = None, **config_changes: Any
) -> Any:
    """Build a transformers model on the `meta` device; its weights are loaded when it is sharded.

    Use this in `configure_model` instead of `from_pretrained`, with `inside="fsdp"`,
    `inside="domino"` or `DominoTPStrategy`. The strategy loads the weights from `folder` while it
    shards the model, and no rank ever holds more than its shards and one unit or layer.

    Args:
        model_class: a transformers class, such as `AutoModelForCausalLM` or `LlamaForCausalLM`.
        folder: a folder of safetensors files written by `save_pretrained`, present on every
            machine.
        config: the model's transformers config; if None, the config in the folder.
        **config_changes: overrides of the folder's config, such as `attention_dropout=0.1`; `dtype`
            sets the parameters' dtype, which is the saved dtype by default.

    Raises:
        TypeError: both `config` and `config_changes` are given.
        ValueError: the folder has no safetensors files, or lacks one of the model's tensors.
    """
    from transformers import AutoConfig

    saved = SavedWeights(folder)
    if config is None:
        config = AutoConfig.from_pretrained(folder, **config_changes)
    elif config_changes:
        names = ", ".join(config_changes)
        raise TypeError(
            f"Got both `config` and overrides of the folder's config ({names}). Pass only one of"
            " the two."
        )
    make = getattr(model_class, "from_config", None) or model_class._from_config
    with torch.device("meta"):
        model = make(config)
    saved.check(model)
    model.saved_weights = saved
    return model


class SavedWeights:
    """Finds tensors in a Hugging Face folder by their names in a model, and reads them.

    It raises a ValueError if the folder contains no safetensors files.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        single, index = self._folder / _SINGLE_FILE, self._folder / _INDEX
        if index.is_file():
            files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif single.is_file():
            with _open_safetensors(single) as file:
                files = dict.fromkeys(file.keys(), _SINGLE_FILE)
        else:
            raise ValueError(
                f"{str(folder)!r} has neither '{_SINGLE_FILE}' nor '{_INDEX}'. Pass a local folder"
                " written by `save_pretrained`, or the path returned by"
                " `huggingface_hub.snapshot_download`."
            )
        self._files = files

    def check(self, model: Any) -> None:
        """Raise a `ValueError` if the folder lacks a parameter or persistent buffer of a model."""
        lacking = [n[0] for n in tensor_names(model).values() if not self.find(model, n)]
        if lacking:
            more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
            raise ValueError(
                f"{str(self._folder)!r} has no tensor named {', '.join(map(repr, lacking[:3]))}"
                f"{more} for `{type(model).__name__}`. Either the folder was saved from a model of"
                " another class, or transformers renames its tensors on load. If the latter, load"
                " it with `from_pretrained` and save it again with `save_pretrained`."
            )

    def find(self, model: Any, names: Iterable[str]) -> str | None:
        """Return the name under which the folder stores one of the model's tensors, or None.

        `names` are the tensor's names in the model; a tied tensor has several.
        """
        # the folder may have been saved from a model with a different head or none, so the base
        # model's prefix is optional
        base = f"{getattr(model, 'base_model_prefix', '')}."
        for name in names:
            for known in (name, name.removeprefix(base), base + name):
                if known in self._files:
                    return known
        return None

    def read(self, name: str) -> Tensor:
        """Load the tensor that the folder stores under `name` into host memory."""
        with _open_safetensors(self._folder / self._files[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def fingerprint(self) -> str:
        """Return a hash of the safetensors files' names, sizes and headers."""
        found = blake2b(digest_size=8)
        for name in sorted(set(self._files.values())):
            path = self._folder / name
            with path.open("rb") as file:
                found.update(f"{name} {path.stat().st_size} ".encode() + file.read(_HEADER_BYTES))
        return found.hexdigest()


def tensor_names(model: nn.Module) -> dict[Tensor, list[str]]:
    """Map each parameter and persistent buffer to its names; a tied tensor has several."""
    found: dict[Tensor, list[str]] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = persistent_buffers(model, remove_duplicate=False).items()
    for name, tensor in (*parameters, *buffers):
        found.setdefault(tensor, []).append(name)
    return found


def _open_safetensors(path: Path) -> Any:
    from safetensors import safe_open  # a dependency of transformers

    return safe_open(path, framework="pt")


def meta_fingerprint(module: nn.Module) -> dict[str, str]:
    """Return, to compare on all ranks, whether a tensor is on `meta`, and a hash of each folder.

    The folders are those from which weights are read. Without any, the dict is empty.
    """
    folders = [getattr(child, "saved_weights", None) for child in module.modules()]
    saved = [folder.fingerprint() for folder in folders if folder is not None]
    found = {"a model on the meta device": str(bool(on_meta(module)))}
    return {**found, "the folder of its weights": " ".join(saved)} if saved else found


def on_meta(module: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers that are on the `meta` device."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in named if tensor.is_meta]


class Materializer:
    """Initializes the layers of a model that are on the `meta` device.

    The model is a transformers model, or contains such models, and its other layers have
    `reset_parameters`, like torch's layers. The seed must be the same on all ranks.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model: Any = model
        self._owners: dict[nn.Module, Any] = {}
        for child in model.modules():
            if hasattr(child, "_init_weights") and child not in self._owners:
                self._owners |= dict.fromkeys(child.modules(), child)
        # a separate RNG state, so that values do not depend on random draws in the user's code
        self._random = torch.Generator().manual_seed(seed).get_state()
        self._saved: dict[Tensor, tuple[SavedWeights, str]] = {}
        for child in model.modules():
            saved: Any = getattr(child, "saved_weights", None)
            for tensor, names in tensor_names(child).items() if saved is not None else ():
                name = saved.find(child, names)
                if name is not None and tensor.is_meta:
                    self._saved[tensor] = saved, name

    @property
    def reads_folder(self) -> bool:
        """Whether any initial values are read from a Hugging Face folder."""
        return bool(self._saved)

    def materialize(self, layer: nn.Module) -> None:
        """Initialize all `meta` tensors of `layer` and its children, in CPU memory.

        Raise a ValueError if the model's `_init_weights` leaves a tensor uninitialized.
        """
        self._initialize(list(_children_first(layer)))

    def materialize_rest(self) -> None:
        """Initialize all layers of the model that are still on `meta`."""
        for module in _children_first(self._model):
            self._initialize([module])

    @torch.no_grad()
    def _initialize(self, modules: list[nn.Module]) -> None:
        """Replace the modules' own `meta` tensors by initialized ones in CPU memory.

        Raise a ValueError if a tensor is left uninitialized.
        """
        made = [(module, *both) for module in modules for both in _replace_meta_tensors(module)]
        drawn = [(module, new) for module, old, new in made if old not in self._saved]
        if drawn:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self._random)
                for module in modules:
                    self._draw(module)
                self._random = torch.get_rng_state()
        # read last, because drawing overwrites the values of a layer's children
        for _, old, new in made:
            if old in self._saved:
                saved, name = self._saved[old]
                new.copy_(saved.read(name))

        left = [type(module).__name__ for module, new in drawn if bool(new.isnan().any())]
        if left:
            raise ValueError(
                f"`{type(self._model).__name__}` is on the meta device, but its `_init_weights`"
                f" does not initialize all tensors of `{left[0]}`. Build the model on the CPU."
            )

    def _draw(self, module: nn.Module) -> None:
        """Run a module's random initialization, `_init_weights` or `reset_parameters`."""
        owner: Any = self._owners.get(module)
        reset: Any = getattr(module, "reset_parameters", None)
        if owner is not None:
            owner._init_weights(module)
        elif reset is not None:
            reset()


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and all its descendants, children before their parents."""
    for child in module.children():
        yield from _children_first(child)
    yield module


def _replace_meta_tensors(module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Replace a module's own `meta` tensors with NaN-filled ones; return (old, new) pairs."""
    made: list[tuple[Tensor, Tensor]] = []
    own: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for tensors in own:
        for name, old in tensors.items():
            if old is None or not old.is_meta:
                continue
            if not old.is_floating_point():
                raise ValueError(
                    f"The buffer '{name}' of `{type(module).__name__}` is on the meta device and"
                    f" has dtype {old.dtype}, which cannot be initialized here. Build the model on"
                    " the CPU, or install a newer version of transformers."
                )

            # NaN reveals values that are never initialized
            new = torch.full_like(old, float("nan"), device="cpu")
            if isinstance(old, nn.Parameter):
                tensors[name] = nn.Parameter(new, requires_grad=old.requires_grad)
            else:
                tensors[name] = new
            made.append((old, new))
    return made
