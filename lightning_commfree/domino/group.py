"""What the sharded modules of one model share: their group, and whether a schedule runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_commfree.comm.channel import Channel, Pending

FORWARD_TAG = "tensor_forward"
BACKWARD_TAG = "tensor_backward"

Trace = Callable[[str, str, int], None]  # what happens, to which sublayer, of which micro-batch


class TensorGroup:
    """The ranks among which a model is divided.

    Args:
        channel: to the ranks of the group; tensors are where the model is.
        seed: of the random numbers that differ from rank to rank, as attention's dropout.

    Attributes:
        scheduled: a schedule launches and lands the all-reduces. Row linears then return partial
            sums, and column linears leave the gradient of their input partial.
        local_logits: the head returns its share of the vocabulary.
        sums_flow: the embedding leaves its sum to the schedule, as `unsummed`.
        unsummed: the embedding's sum over this rank's words, until the schedule takes it.
    """

    def __init__(self, channel: Channel, seed: int = 0) -> None:
        self.channel = channel
        self.scheduled = False
        self.local_logits = False
        self.sums_flow = False
        self.unsummed: Tensor | None = None
        self._own_random = torch.Generator().manual_seed(seed + 1 + channel.rank).get_state()
        self._own_device_random: Tensor | None = None
        self._seed = seed

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.channel.size

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.channel.rank

    def all_reduce(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        """Start to sum `tensor` over the group, in place; with nccl on the group's own stream."""
        return self.channel.all_reduce(tensor.contiguous(), tag)

    @contextmanager
    def under_schedule(self) -> Iterator[None]:
        """In the body a schedule runs the modules."""
        before, self.scheduled = self.scheduled, True
        try:
            yield
        finally:
            self.scheduled = before

    @contextmanager
    def own_random(self, device: torch.device) -> Iterator[None]:
        """In the body random numbers differ from rank to rank; outside they are the same."""
        shared, on_device = random_state(device)

        if self._own_device_random is None and on_device is not None:
            torch.manual_seed(self._seed + 1 + self.rank)
            self._own_device_random = random_state(device)[1]

        set_random_state(device, (self._own_random, self._own_device_random))
        try:
            yield
        finally:
            self._own_random, self._own_device_random = random_state(device)
            set_random_state(device, (shared, on_device))

    def own_state(self) -> tuple[Tensor, Tensor | None]:
        """Return the states of the generators that differ from rank to rank, CPU's and device's.

        Bytes in CPU memory; None for a device that has not drawn yet.
        """
        return self._own_random, self._own_device_random

    def load_own_state(self, state: tuple[Tensor, Tensor | None]) -> None:
        """Put back what `own_state` returned."""
        self._own_random, self._own_device_random = state

    def random_states(self, device: torch.device) -> tuple[Any, Any]:
        """Return the states of the shared and of this rank's own random numbers."""
        return random_state(device), self.own_state()

    @contextmanager
    def replayed(self, device: torch.device, states: tuple[Any, Any]) -> Iterator[None]:
        """In the body random numbers are those that came after `states` were taken."""
        now = self.random_states(device)
        self._set_states(device, states)
        try:
            yield
        finally:
            self._set_states(device, now)

    def _set_states(self, device: torch.device, states: tuple[Any, Any]) -> None:
        shared, (self._own_random, self._own_device_random) = states
        set_random_state(device, shared)


def random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the states of the CPU's generator and of the device's."""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_device


def set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    """Put back what `random_state` returned."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
