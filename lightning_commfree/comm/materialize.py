"""Values for a model that was built on the `meta` device, where tensors have shapes only.

1. A rank gives one layer its values: from the folder of `saved_weights`, by the model's own
   `_init_weights`, or by `reset_parameters`.
2. It keeps its part of them and drops the rest.
3. The next layer.

So a rank never holds more than its part of the model and one whole layer. All ranks draw the same
random numbers, for whole layers: the values do not depend on the number of ranks. A model that is
built with values has other ones, for it draws them in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_commfree.comm.saved_weights import SavedWeights, names_of


def described(module: nn.Module) -> dict[str, str]:
    """Return what ranks must have alike before they give a model values."""
    folders = [getattr(child, "saved_weights", None) for child in module.modules()]
    saved = [folder.fingerprint() for folder in folders if folder is not None]
    found = {"a model on the meta device": str(bool(on_meta(module)))}
    return {**found, "the folder of its weights": " ".join(saved)} if saved else found


def on_meta(module: nn.Module) -> list[str]:
    """Return the names of parameters and buffers without values."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in named if tensor.is_meta]


class Materializer:
    """Gives values to one model, layer by layer, in the order of its calls.

    Args:
        model: of transformers, whose `_init_weights` is used, or the folder that
            `from_pretrained_on_meta` has named; or a module that holds such models, where what
            belongs to none has a `reset_parameters`, as torch's layers do.
        seed: of the values, the same on all ranks.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model: Any = model
        self._owners: dict[nn.Module, Any] = {}
        for child in model.modules():
            if hasattr(child, "_init_weights") and child not in self._owners:
                self._owners |= dict.fromkeys(child.modules(), child)
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
        """Whether some values lie in a folder."""
        return bool(self._saved)

    def materialize(self, layer: nn.Module) -> None:
        """Give values to all tensors of `layer` and below that have none, in CPU memory.

        Raises:
            ValueError: the model's `_init_weights` leaves some out.
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
        for _, old, new in made:  # last: drawing gives a layer's children values too
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
    """Put NaN into a module's own tensors that have no values; return these and their like."""
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
