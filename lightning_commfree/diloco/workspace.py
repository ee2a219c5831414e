"""Buffers for what lies between the values and the codes of a chunk, and tables for E3M0."""

from __future__ import annotations

import threading
from functools import cached_property

import torch
from torch import Tensor

MANTISSA_BITS = 23
EXPONENT_OF_NAN = 255
LOWEST_TOP = 9  # biased exponent of 2^-118: below it the codes' lowest power would be subnormal
HIGHEST_TOP = 246  # of 2^119: above it 2^(E+8) is more than fp32 holds
_EXPONENT_BIAS = 127


class ChunkWorkspace:
    """Buffers for what lies between the values and the codes of one chunk, shape (B, V).

    Args:
        workspace: from which it is cut.
        shape: of the chunk: blocks, values of a block.
    """

    def __init__(self, workspace: Workspace, shape: tuple[int, int]) -> None:
        self._workspace, self.shape = workspace, shape

    @cached_property
    def fp32(self) -> Tensor:
        """Shape (B, V)."""
        return self._cut(torch.float32)

    @cached_property
    def bits(self) -> Tensor:
        """`fp32` as int32."""
        return self.fp32.view(torch.int32)

    @cached_property
    def half(self) -> Tensor:
        """Fp16, shape (B, V)."""
        return self._cut(torch.float16)

    @cached_property
    def half_bits(self) -> Tensor:
        """`half` as int16."""
        return self.half.view(torch.int16)

    @cached_property
    def codes(self) -> Tensor:
        """Uint8, shape (B * V,)."""
        return self._cut(torch.uint8).view(-1)

    @cached_property
    def more_codes(self) -> Tensor:
        """As `codes`."""
        return self._cut(torch.uint8, 1).view(-1)

    @cached_property
    def top(self) -> Tensor:
        """Int32, shape (B,)."""
        return self._workspace.new(self.shape[0], torch.int32)

    @cached_property
    def factor(self) -> Tensor:
        """Fp32, shape (B, 1)."""
        return self._workspace.new(self.shape[0], torch.float32).unsqueeze(1)

    def _cut(self, dtype: torch.dtype, place: int = 0) -> Tensor:
        num_blocks, block = self.shape
        return self._workspace.flat(dtype, place)[: num_blocks * block].view(self.shape)


class Workspace:
    """Buffers for chunks of any shape up to a size, and the tables of E3M0 by biased exponent.

    All of it is made when it is asked for.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        self.numel, self._device = numel, device
        self._flat: dict[tuple[torch.dtype, int], Tensor] = {}
        self._chunk: ChunkWorkspace | None = None

    def chunk(self, shape: tuple[int, int]) -> ChunkWorkspace:
        """Return what a chunk of this shape is worked on in; good until another shape comes."""
        if self._chunk is None or self._chunk.shape != shape:
            self._chunk = ChunkWorkspace(self, shape)
        return self._chunk

    def flat(self, dtype: torch.dtype, place: int) -> Tensor:
        """Return the whole of one buffer."""
        if (dtype, place) not in self._flat:
            self._flat[dtype, place] = self.new(self.numel, dtype)
        return self._flat[dtype, place]

    def new(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of shape (numel,) that can be written to in and out of inference mode."""
        with torch.inference_mode(False):
            return torch.empty(numel, dtype=dtype, device=self._device)

    @cached_property
    def scales(self) -> Tensor:
        """Uint8, shape (256,): the byte that goes over the wire."""
        return self._exponents().to(torch.uint8)

    @cached_property
    def factors(self) -> Tensor:
        """Fp32, shape (256, 1): 2^(-E-8), with which a block is multiplied; 0 to make it zero."""
        exponents = self._exponents()

        # in two steps, because the exponent of the product may lie below those of fp32
        factors = _power_of_two(2 * _EXPONENT_BIAS + 1 - exponents) * 2**-9
        return factors.masked_fill_(exponents == 0, 0.0).unsqueeze(1)

    @cached_property
    def powers(self) -> Tensor:
        """Fp32, shape (256, 1): 2^(E+8), with which a block is multiplied on the way back."""
        exponents = self._exponents()
        powers = _power_of_two(exponents.clamp(max=HIGHEST_TOP)) * 2**8
        return powers.masked_fill_(exponents == EXPONENT_OF_NAN, torch.nan).unsqueeze(1)

    def _exponents(self) -> Tensor:
        """Int32, shape (256,): what becomes of the blocks' biased exponents."""
        exponents = torch.arange(EXPONENT_OF_NAN + 1, dtype=torch.int32, device=self._device)
        exponents.masked_fill_(exponents < LOWEST_TOP, 0)
        return exponents.masked_fill_(exponents > HIGHEST_TOP, EXPONENT_OF_NAN)


# A CPU's memory comes page by page, slower than the work that is done in it: a thread keeps its
# workspace, which means nothing between two calls. A device's allocator keeps memory by itself.
_of_thread = threading.local()


def workspace_for(shape: tuple[int, int], device: torch.device) -> Workspace:
    """Return a workspace for a chunk of this shape; on a CPU the thread's own, kept for all."""
    numel = shape[0] * shape[1]
    if device.type != "cpu":
        return Workspace(numel, device)

    kept: Workspace | None = getattr(_of_thread, "workspace", None)
    if kept is None or kept.numel < numel:
        kept = _of_thread.workspace = Workspace(numel, device)
    return kept


def _power_of_two(biased_exponents: Tensor) -> Tensor:
    """Return 2^(e - 127) in fp32 for int32 `biased_exponents` from 1 to 254; 0 for 0."""
    return (biased_exponents << MANTISSA_BITS).view(torch.float32)
