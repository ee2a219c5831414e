"""Pytest plugin that removes the Vulkan device from Debian's build of torch.

Debian builds torch with Vulkan, which counts as an available device. So the first backward pass of
a process starts a thread for it, and processes forked later cannot compute gradients: "Unable to
handle autograd's threading in combination with fork-based multiprocessing". Our tests fork ranks.
"""

import ctypes

import torch

_VULKAN, _KINDS = 10, 21  # values of c10::DeviceType

assert torch.__version__.startswith("2.6.0"), "the registry may differ in other releases"
_registry = (ctypes.c_void_p * _KINDS).in_dll(
    ctypes.CDLL("libc10.so.2.6"), "_ZN3c104impl26device_guard_impl_registryE"
)
_registry[_VULKAN] = None
