"""A plugin of pytest for Debian's torch: its Vulkan, which no machine of ours has, is not there.

Debian builds torch with Vulkan, which counts as a device that there is, so the first backward of a
process starts a thread for it, and children that are forked later cannot compute gradients: "Unable
to handle autograd's threading in combination with fork-based multiprocessing". Tests fork ranks.
"""

import ctypes

import torch

_VULKAN, _KINDS = 10, 21  # of c10::DeviceType

assert torch.__version__.startswith("2.6.0"), "of another release the registry may be another one"
_registry = (ctypes.c_void_p * _KINDS).in_dll(
    ctypes.CDLL("libc10.so.2.6"), "_ZN3c104impl26device_guard_impl_registryE"
)
_registry[_VULKAN] = None
