"""The states of the random number generators, in a form that a checkpoint can hold."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from lightning_utilities.core.imports import module_available


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
