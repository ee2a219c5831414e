"""The states of random number generators, in a form that a checkpoint can hold.

Those of the process, and those that data loaders and their samplers have of their own.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.imports import module_available
from torch import Tensor
from torch.utils.data import DistributedSampler

Drawn = dict[str, Any]  # "random": of the host; "generators": of loaders and samplers


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, numpy's, torch's and, on a CUDA device, its generator.

    Only tensors and plain values, which load with `weights_only=True`.
    """
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":  # not of all that the process sees: it may see others at the resume
        states["device"] = torch.cuda.get_rng_state(device)
    if module_available("numpy"):
        import numpy as np

        kind, keys, *rest = np.random.get_state()
        states["numpy"] = (kind, [int(key) for key in keys], *rest)
    return states


def set_random_state(states: Mapping[str, Any], device: torch.device) -> None:
    """Draw from here on as at the moment at which `random_state` returned `states`."""
    torch.set_rng_state(states["torch"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))  # a tuple may come back as a list
    if "numpy" in states and module_available("numpy"):
        import numpy as np

        np.random.set_state(states["numpy"])
    if device.type == "cuda" and "device" in states:
        torch.cuda.set_rng_state(states["device"].cpu(), device)


def loader_generators(loaders: Iterable[object]) -> list[torch.Generator]:
    """Return the generators of loaders and their samplers, each once; the global one is not one."""
    seen: dict[int, object] = {}
    parts = list(loaders)
    while parts:
        part = parts.pop(0)
        if part is None or id(part) in seen:
            continue
        seen[id(part)] = part
        names = ("generator", "sampler", "batch_sampler")
        parts += [getattr(part, name, None) for name in names]
        if isinstance(part, DistributedSampler):  # it may wrap a sampler, as Lightning's does
            inside = getattr(part.dataset, "__dict__", {}).values()
            parts += [one for one in inside if isinstance(one, Iterable)]
    return [part for part in seen.values() if isinstance(part, torch.Generator)]


def drawn(loaders: Iterable[object]) -> Drawn:
    """Return where the host's random numbers stand, and those of loaders."""
    generators = [generator.get_state() for generator in loader_generators(loaders)]
    return {"random": random_state(torch.device("cpu")), "generators": generators}


def set_drawn(state: Drawn | None, loaders: Iterable[object]) -> None:
    """Draw from here on as at the moment at which `drawn` returned `state`, if there is one."""
    if state is not None:
        set_random_state(state["random"], torch.device("cpu"))
        set_generators(state["generators"], loaders)


def set_epoch(epoch: int, loaders: Iterable[object]) -> None:
    """Tell the loaders' samplers which epoch it is; some draw their order from its number."""
    for loader in loaders:
        for owner in (loader, getattr(loader, "batch_sampler", None)):
            sampler: Any = getattr(owner, "sampler", None)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)


def set_generators(states: Sequence[Tensor], loaders: Iterable[object]) -> None:
    """Let generators of loaders and samplers go on from `states`."""
    generators = loader_generators(loaders)
    if len(generators) == len(states):  # else these are other loaders
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
