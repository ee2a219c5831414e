"""One fragment's global copy and what a replica does with it (arXiv:2501.18512, Algorithm 2).

No communication happens here. The global copy is fp32 whatever the parameters are, a tensor of its
own beside them, and changes in `outer_step` only. The mixed local value never becomes the reference
of the next outer gradient: replicas would drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.digest import digest
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.diloco.fragments import Fragment
from lightning_commfree.diloco.settings import OuterOptimizerFactory

REPLICA_TAG = "replica"


class OuterFragment:
    """The two copies of a fragment: the module's own tensors and the global copy.

    Args:
        module: the model; its tensors named in `fragment` are the local copy, changed in place.
        fragment: which of them.
        outer_optimizer: makes the outer optimizer from the fragment's global copies: fp32, in the
            parameters' shapes. In a replica of several ranks they are flat pieces of them, so that
            an optimizer must treat every element by itself, as SGD and Adam do.
        replica: channel to the ranks of the same replica. Each holds one shard of the global copy
            and of the outer optimizer's state; they act together wherever the whole is needed.
        device: where the global copy and the outer optimizer's state live; host memory is pinned
            where there is a CUDA device. None: where the parameters are.

    Attributes:
        fragment: as above.
        global_copy: fp32, shape (S,), S = ceil(N / k) for k ranks: this rank's shard of all tensors
            one after the other, parameters before buffers; filled up with zeros.
        parameter_numel: how many of the S values come first and travel in the wire format; those
            behind are buffers, which travel as they are. S in a fragment without buffers.
        optimizer: the outer optimizer.
        scheduler: of its learning rate, stepped after each outer step; None without one.
        landings: how often the global copy has moved: by outer steps, and to the mean at an end.

    Raises:
        TypeError: `outer_optimizer` did not return a torch optimizer.
    """

    def __init__(
        self,
        module: nn.Module,
        fragment: Fragment,
        outer_optimizer: OuterOptimizerFactory,
        replica: Channel | None = None,
        device: str | None = None,
    ) -> None:
        self._module = module
        self.fragment = fragment
        self._replica = replica or Channel([0], 0, Ledger())
        self._sizes = [local.numel() for local in self.local]
        self.shard_numel = -(-sum(self._sizes) // self._replica.size)
        start = self.local_values()
        self.global_copy = start if device is None else _moved(start, device)
        split = len(fragment.parameters)
        pieces = self._pieces(self.global_copy)
        self._outer_parameters = [nn.Parameter(piece) for i, piece in pieces if i < split]
        self._outer_buffers = [piece for i, piece in pieces if i >= split]
        self.parameter_numel = self.shard_numel
        if fragment.buffers:
            self.parameter_numel = sum(piece.numel() for piece in self._outer_parameters)
        # a shard may hold buffers alone, or nothing: optimizers refuse an empty list
        nothing = [nn.Parameter(self.global_copy[:0])]
        made = outer_optimizer(self._outer_parameters or nothing)
        self.optimizer: Optimizer
        self.scheduler: LRScheduler | None
        self.optimizer, self.scheduler = made if isinstance(made, tuple) else (made, None)
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(
                f"`outer_optimizer` returned a {type(self.optimizer).__name__}; it must take a list"
                " of parameters and return a `torch.optim.Optimizer`, like"
                " `functools.partial(torch.optim.SGD, lr=0.4)`, or a tuple of it and a learning"
                " rate scheduler."
            )
        self.landings = 0

    @property
    def names(self) -> tuple[Sequence[str], Sequence[str]]:
        """Of the parameters, and of the buffers."""
        return self.fragment.parameters, self.fragment.buffers

    @property
    def local(self) -> list[Tensor]:
        """The module's own tensors, parameters before buffers; they are asked for at every use.

        A module may put another tensor in a buffer's place, and `.data` of a parameter may change.
        """
        return [_tensor(self._module, name).detach() for kind in self.names for name in kind]

    def outer_gradient(self, local: Sequence[Tensor] | None = None) -> Tensor:
        """Return what leaves for the other replicas: fp32, shape (S,), a new tensor.

        Of parameters global copy minus local copy, old minus new. Of buffers the local values
        themselves: they are averaged and not stepped, and a rounded difference could make a
        variance negative. `local` is the local copy where the module holds another one now.
        """
        gradient = self.local_values(local)
        parameters = gradient[: self.parameter_numel]
        outer = self.global_copy[: self.parameter_numel].to(gradient.device, non_blocking=True)
        torch.sub(outer, parameters, out=parameters)
        return gradient

    def is_local(self, buffers: bool = True) -> bool:
        """Return whether the local copy is the global one, in its own dtype; buffers on demand."""
        local = self.local[: None if buffers else len(self.fragment.parameters)]
        here = self._pieces(self.local_values().to(self.global_copy.device))
        for (i, outer), (_, mine) in zip(self._pieces(self.global_copy), here, strict=True):
            if i >= len(local):
                break
            ours = outer.to(local[i].dtype).float()
            if not torch.allclose(ours, mine, rtol=0, atol=0, equal_nan=True):
                return False
        return True

    def take_local(self) -> None:
        """Make the local copy the global one, before anything has been exchanged."""
        self.global_copy.copy_(self.local_values())

    def digest(self) -> Tensor:
        """Return a hash of the global copy's bits: int64, no dimension, never 0 but by chance."""
        return digest(self.global_copy)

    def outer_step(self, mean: Tensor) -> None:
        """Step the outer optimizer on the global copy of the parameters.

        Args:
            mean: the replicas' mean outer gradient, fp32, shape (S,).
        """
        means = [piece for _, piece in self._pieces(mean)]
        for outer, gradient in zip(self._outer_parameters, means, strict=False):
            outer.grad = gradient
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.landings += 1

    def average_buffers(self, mean: Tensor) -> None:
        """Put the replicas' mean of the buffers into the global copy; `mean` as in `outer_step`."""
        means = [piece for _, piece in self._pieces(mean)]
        of_buffers = means[len(self._outer_parameters) :]
        for buffer, value in zip(self._outer_buffers, of_buffers, strict=True):
            buffer.copy_(value)

    def local_mean(self, mean: Tensor) -> Tensor:
        """Return the replicas' mean local copy: fp32, shape (S,), a new tensor.

        Args:
            mean: of what `outer_gradient` returned on each of them. All had this global copy.
        """
        values = mean.clone()
        parameters = values[: self.parameter_numel]
        torch.sub(self.global_copy[: self.parameter_numel], parameters, out=parameters)
        return values

    def settle(self, local_mean: Tensor | None) -> None:
        """Make the replicas' mean both copies; the outer optimizer has no part in it.

        The global copy then is what the local one holds, in bf16 too: a second time moves nothing.

        Args:
            local_mean: fp32, shape (S,), the same on all replicas. None: of one replica alone. Its
                local copy stays as it is.
        """
        if local_mean is not None:
            self.global_copy.copy_(local_mean)
            self.merge(mix=0.0)
        self.take_local()
        if local_mean is None and self._replica.size > 1:  # its ranks have buffers of their own
            self.merge(mix=0.0)
        self.landings += 1

    def merge(self, mix: float, buffers: bool = True, shown: Tensor | None = None) -> None:
        """Set local <- mix local + (1 - mix) global, in fp32, rounded once to the local dtype.

        With `mix` 0 the global copy is taken and with 1 the local one, whatever the other holds,
        NaN included. A buffer's value that equals the global one in fp32 stays as it is, so that
        constants keep their infinities and their precision; without `buffers` all of them do.

        Args:
            mix: weight of the local copy.
            buffers: whether these are merged too.
            shown: values that take the global copy's place, fp32, shape (S,).
        """
        if mix == 1.0:
            return
        split = len(self.fragment.parameters)
        whole = self._whole(self.global_copy if shown is None else shown)
        views = self._views(whole.to(self.local[0].device))
        for i, (local, outer) in enumerate(zip(self.local, views, strict=True)):
            if i >= split and not buffers:
                break
            if mix and i < split and local.dtype == torch.float32:
                local.lerp_(outer, 1.0 - mix)  # the same bits, without a copy in between
                continue
            merged = torch.lerp(local.float(), outer, 1.0 - mix) if mix else outer
            if i >= split:
                merged = torch.where(local.float() == outer, local, merged.to(local.dtype))
            local.copy_(merged)

    def show(self, shown: Tensor | None = None) -> None:
        """Take the global copy, or `shown` in its place, as `merge` does."""
        self.merge(mix=0.0, shown=shown)

    def outer(self) -> list[Tensor]:
        """Return the global copy as tensors like `local`, in their order: views where they can be.

        Collective within a replica.
        """
        views = self._views(self._whole(self.global_copy))
        return [view.to(local.dtype) for view, local in zip(views, self.local, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return the global copy, the outer optimizer's state and the number of landings.

        The tensors are those that it goes on with: the global copy's in the parameters' shapes,
        where a rank has them whole.
        """
        return {
            "global_copy": [piece for _, piece in self._pieces(self.global_copy)],
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "landings": self.landings,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        pieces = [piece for _, piece in self._pieces(self.global_copy)]
        for piece, saved in zip(pieces, state["global_copy"], strict=True):
            piece.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.landings = state["landings"]

    def _whole(self, shard: Tensor) -> Tensor:
        """Return the shards of all ranks of the replica, shape (N,)."""
        if self._replica.size == 1:
            return shard
        shards = self._replica.all_gather(shard.to(self._replica.device), REPLICA_TAG)
        return shards.wait().to(shard.device).view(-1)[: sum(self._sizes)]

    def local_values(self, local: Sequence[Tensor] | None = None) -> Tensor:
        """Return this rank's shard of the local copy: fp32, shape (S,), a new tensor."""
        tensors = self.local if local is None else local
        flat = torch.cat([tensor.reshape(-1).float() for tensor in tensors])
        if self._replica.size == 1:
            return flat
        start = self._replica.rank * self.shard_numel
        shard = flat.new_zeros(self.shard_numel)
        mine = flat[start : start + self.shard_numel]
        shard[: mine.numel()].copy_(mine)
        return shard

    def _pieces(self, shard: Tensor) -> list[tuple[int, Tensor]]:
        """Cut a shard at the borders of the tensors: the tensor's number and the piece, a view.

        A replica of one rank has every tensor whole, in its shape.
        """
        if self._replica.size == 1:
            return list(enumerate(self._views(shard)))
        start, pieces, begin = self._replica.rank * self.shard_numel, [], 0
        for i, size in enumerate(self._sizes):
            low, high = max(begin - start, 0), min(begin + size - start, self.shard_numel)
            if low < high:
                pieces.append((i, shard[low:high]))
            begin += size
        return pieces

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, self._sizes)
        return [part.view(local.shape) for part, local in zip(parts, self.local, strict=True)]


def _tensor(module: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer; a frozen parameter may be averaged as buffers are."""
    owner, _, own_name = name.rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(owner), own_name)
    return tensor


def _moved(copy: Tensor, device: str) -> Tensor:
    """Return the copy on `device`, in pinned memory if that helps the way back."""
    on_host = copy.to(device)
    return on_host.pin_memory() if copy.is_cuda and on_host.device.type == "cpu" else on_host
