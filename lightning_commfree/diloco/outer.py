"""One fragment's global copy and what a replica does with it (arXiv:2501.18512, Algorithm 2).

No communication happens here. The global copy is fp32 whatever the parameters are, a tensor of its
own beside them, and changes in `outer_step` only. The mixed local value never becomes the reference
of the next outer gradient: replicas would drift apart.

What of a fragment's tensors a rank exchanges, and how it lies in one flat tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.digest import digest
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.diloco.fragments import Fragment
from lightning_commfree.diloco.settings import OuterOptimizerFactory, make_outer_optimizer
from lightning_commfree.model.shards import is_part, own


class Share(NamedTuple):
    """Some values of one tensor, behind each other."""

    tensor: int  # its number
    start: int
    end: int


@dataclass(frozen=True)
class Layout:
    """Decided once, for a rank of a replica; see `of`.

    Attributes:
        shapes: of the tensors, as this rank holds them.
        sizes: the values in each of them.
        copies: the numbers of those that all ranks of the replica hold alike.
        copied: C, the values of these.
        shares: what this rank exchanges, in its order.
        lengths: values in each share.
        fill: zeros behind them, up to the size of the others' shard.
        numel: S, all values that this rank exchanges.
        parameter_numel: how many of them come first and are of parameters.
    """

    shapes: list[torch.Size]
    sizes: list[int]
    copies: list[int]
    copied: int
    shares: list[Share]
    lengths: list[int]
    fill: int
    numel: int
    parameter_numel: int

    @classmethod
    def of(
        cls,
        local: Sequence[Tensor],
        are_parts: Sequence[bool],
        num_parameters: int,
        rank: int,
        size: int,
    ) -> Layout:
        """Decide it.

        The ranks of a replica hold a tensor alike, or a *part* of it each (`comm.parts`). Of what
        they hold alike a rank exchanges one shard of ceil(C / k) values, for C values and k ranks;
        of the parts its own. Parameters come before buffers, and shards of copies before parts.

        Args:
            local: the tensors as this rank holds them, parameters before buffers.
            are_parts: which of them are parts.
            num_parameters: how many of them are parameters.
            rank: in the replica.
            size: k.
        """
        sizes = [tensor.numel() for tensor in local]
        copies = [i for i, is_part in enumerate(are_parts) if not is_part]
        parts = [Share(i, 0, sizes[i]) for i, is_part in enumerate(are_parts) if is_part]
        copied = sum(sizes[i] for i in copies)
        shard = -(-copied // size)
        mine = _cut(sizes, copies, rank * shard, shard, empty=size == 1)

        # stable: within both kinds the copies stay first
        shares = sorted([*mine, *parts], key=lambda share: share.tensor >= num_parameters)
        fill = shard - sum(share.end - share.start for share in mine)
        lengths = [share.end - share.start for share in shares]
        numel = parameter_numel = sum(lengths) + fill
        if num_parameters < len(local):
            trained = zip(shares, lengths, strict=True)
            parameter_numel = sum(n for share, n in trained if share.tensor < num_parameters)

        shapes = [tensor.shape for tensor in local]
        return cls(shapes, sizes, copies, copied, shares, lengths, fill, numel, parameter_numel)


def _cut(
    sizes: Sequence[int], copies: Sequence[int], start: int, shard: int, empty: bool
) -> list[Share]:
    """Return the values of the copies from `start` on that make up one shard.

    With `empty` a tensor without values has a share too.
    """
    shares, begin = [], 0
    for i in copies:
        low, high = max(begin, start), min(begin + sizes[i], start + shard)
        if low < high or empty:
            shares.append(Share(i, low - begin, high - begin))
        begin += sizes[i]
    return shares


REPLICA_TAG = "replica"


class Shards:
    """What a rank exchanges of a fragment's tensors: out of them, and back.

    Args:
        layout: how it lies in one flat tensor.
        replica: channel to the ranks of the same replica.
    """

    def __init__(self, layout: Layout, replica: Channel) -> None:
        self._layout, self._replica = layout, replica

    def own(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return what this rank exchanges of such tensors: fp32, shape (S,), new."""
        shares = self._layout.shares
        pieces = [tensors[i].reshape(-1)[low:high].float() for i, low, high in shares]
        zeros = torch.zeros(self._layout.fill, device=tensors[0].device)
        return torch.cat([*pieces, zeros])

    def whole(self, values: Tensor, device: torch.device | None = None) -> list[Tensor]:
        """Return the tensors as a rank holds them, on a device; collective where some are copies.

        Views where they can be. None: the device of `values`.
        """
        layout, device = self._layout, device or values.device
        flat: list[Tensor] = [values[:0]] * len(layout.sizes)
        slices = self.slices(values)
        for i, piece in slices:
            flat[i] = piece

        if self._replica.size > 1 and layout.copied:
            mine, zeros = set(layout.copies), values.new_zeros(layout.fill)
            shard = torch.cat([piece for i, piece in slices if i in mine] + [zeros])
            shards = self._replica.all_gather(shard.to(self._replica.device), REPLICA_TAG).wait()
            sizes = [layout.sizes[i] for i in layout.copies]
            copies = torch.split(shards.view(-1)[: layout.copied], sizes)
            for i, piece in zip(layout.copies, copies, strict=True):
                flat[i] = piece
        pieces = zip(flat, layout.shapes, strict=True)
        return [piece.to(device).view(shape) for piece, shape in pieces]

    def slices(self, values: Tensor) -> list[tuple[int, Tensor]]:
        """Cut what a rank exchanges at the borders of the tensors: the tensor's number, a view.

        A replica of one rank has every tensor in its shape; else slices are flat.
        """
        layout = self._layout
        exchanged = values[: sum(layout.lengths)]
        pieces = torch.split(exchanged, layout.lengths) if layout.lengths else ()
        slices = [(share.tensor, one) for share, one in zip(layout.shares, pieces, strict=True)]
        if self._replica.size > 1:
            return slices
        return [(i, piece.view(layout.shapes[i])) for i, piece in slices]


class OuterFragment:
    """The two copies of a fragment: the module's own tensors and the global copy.

    Args:
        module: the model; its tensors named in `fragment` are the local copy, changed in place.
        fragment: which of them.
        outer_optimizer: makes the outer optimizer from the fragment's global copies: fp32, in the
            parameters' shapes. In a replica of several ranks they are flat slices of them, so that
            an optimizer must treat every element by itself, as SGD and Adam do.
        replica: channel to the ranks of the same replica. Each holds one shard of the global copy
            and of the outer optimizer's state; they act together wherever the whole is needed.
        device: where the global copy and the outer optimizer's state live; host memory is pinned
            where there is a CUDA device. None: where the parameters are.

    Attributes:
        fragment, replica: as above.
        global_copy: fp32, shape (S,): this rank's shard of all tensors one after the other,
            parameters before buffers; see `Layout`. `shard_numel` is S.
        parameter_numel: how many of the S values come first and travel in the wire format; those
            behind are buffers, which travel as they are. S in a fragment without buffers.
        optimizer: the outer optimizer; `scheduler` sets its learning rate, if there is one.
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
        self._module, self.fragment = module, fragment
        self.replica = replica or Channel([0], 0, Ledger())
        named = [_tensor(module, name) for name in (*fragment.parameters, *fragment.buffers)]
        are_parts, split = [is_part(tensor) for tensor in named], len(fragment.parameters)
        self._own = own if any(are_parts) else Tensor.detach
        layout = Layout.of(self.local, are_parts, split, self.replica.rank, self.replica.size)
        self._shards = Shards(layout, self.replica)
        self.shard_numel, self.parameter_numel = layout.numel, layout.parameter_numel
        start = self.local_values()
        self.global_copy = start if device is None else _moved(start, device)

        slices = self._shards.slices(self.global_copy)
        self._outer_parameters = [nn.Parameter(part) for i, part in slices if i < split]
        self._outer_buffers = [part for i, part in slices if i >= split]

        # a shard may hold buffers alone, or nothing: optimizers refuse an empty list
        nothing = [nn.Parameter(self.global_copy[:0])]
        self.optimizer, self.scheduler = make_outer_optimizer(
            outer_optimizer, self._outer_parameters or nothing
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
        names = [*self.fragment.parameters, *self.fragment.buffers]
        return [self._own(_tensor(self._module, name)) for name in names]

    # -- the local copy

    def local_values(self, local: Sequence[Tensor] | None = None) -> Tensor:
        """Return this rank's shard of the local copy: fp32, shape (S,), a new tensor."""
        return self._shards.own(self.local if local is None else local)

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
        here = self._shards.slices(self.local_values().to(self.global_copy.device))
        for (i, outer), (_, mine) in zip(self._shards.slices(self.global_copy), here, strict=True):
            if i >= len(local):
                break
            ours = outer.to(local[i].dtype).float()
            if not torch.allclose(ours, mine, rtol=0, atol=0, equal_nan=True):
                return False
        return True

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
        split, device = len(self.fragment.parameters), self.local[0].device
        outers = self._shards.whole(self.global_copy if shown is None else shown, device)

        for i, (local, outer) in enumerate(zip(self.local, outers, strict=True)):
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
        """Let the local copy be the global one, or `shown` in its place, as `merge` takes it."""
        self.merge(mix=0.0, shown=shown)

    # -- the global copy

    def outer(self) -> list[Tensor]:
        """Return the global copy as tensors like `local`, in their order: views where they can be.

        Collective within a replica.
        """
        outers = self._shards.whole(self.global_copy)
        return [outer.to(local.dtype) for outer, local in zip(outers, self.local, strict=True)]

    def digest(self) -> Tensor:
        """Return a hash of the global copy's bits: int64, no dimension, never 0 but by chance."""
        return digest(self.global_copy)

    def outer_step(self, mean: Tensor) -> None:
        """Step the outer optimizer on the global copy of the parameters.

        Args:
            mean: the replicas' mean outer gradient, fp32, shape (S,).
        """
        means = [part for _, part in self._shards.slices(mean)]
        for outer, gradient in zip(self._outer_parameters, means, strict=False):
            outer.grad = gradient

        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.landings += 1

    def average_buffers(self, mean: Tensor) -> None:
        """Put the replicas' mean of the buffers into the global copy; `mean` as in `outer_step`."""
        means = [part for _, part in self._shards.slices(mean)][len(self._outer_parameters) :]
        for buffer, value in zip(self._outer_buffers, means, strict=True):
            buffer.copy_(value)

    def take_local(self) -> None:
        """Make the local copy the global one, before anything has been exchanged."""
        self.global_copy.copy_(self.local_values())

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Return the global copy, the outer optimizer's state and the number of landings.

        The tensors are those that it goes on with: the global copy's in the parameters' shapes,
        where a rank has them whole.
        """
        return {
            "global_copy": [part for _, part in self._shards.slices(self.global_copy)],
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "landings": self.landings,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        parts = [part for _, part in self._shards.slices(self.global_copy)]
        for part, saved in zip(parts, state["global_copy"], strict=True):
            part.copy_(saved)

        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.landings = state["landings"]


def _tensor(module: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer; a frozen parameter may be averaged as buffers are."""
    owner, _, own_name = name.rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(owner), own_name)
    return tensor


def _moved(copy: Tensor, device: str) -> Tensor:
    """Return the copy on `device`, in pinned memory if that helps the way back."""
    on_host = copy.to(device)
    return on_host.pin_memory() if copy.is_cuda and on_host.device.type == "cpu" else on_host
