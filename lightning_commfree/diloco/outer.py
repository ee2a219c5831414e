"""A fragment's global copy and outer optimizer (arXiv:2501.18512, Algorithm 2).

Nothing here communicates with other replicas. The next outer gradient is always relative to the
global copy, never to the mixed local copy; otherwise replicas would drift apart.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.digest import digest
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.diloco.fragments import Fragment
from lightning_commfree.diloco.settings import OuterOptimizerFactory, make_outer_optimizer
from lightning_commfree.model.replication import AveragedBuffers
from lightning_commfree.model.shards import is_shard, local_tensor

WITHIN_TAG = "replica"


class Slice(NamedTuple):
    """A range of consecutive values in one of a fragment's tensors."""

    tensor: int  # index of the tensor
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of values in the slice."""
        return self.stop - self.start


class Frozen(NamedTuple):
    """Indices of a fragment's parameters that are frozen when the fragment is launched."""

    # those frozen since the last launch: at the landing, both copies become the mean of the
    # replicas' local copies, without an outer step
    settling: frozenset[int] = frozenset()
    settled: frozenset[int] = frozenset()  # those that have settled: nothing changes them


NONE_FROZEN = Frozen()


class ShardLayout:
    """Layout of a flat buffer with the slices of a fragment's tensors that this rank exchanges.

    Each of the k ranks of a replica holds either a *copy* of a tensor or a *shard* of it. A rank
    exchanges all of its shards, but only 1/k of the copied values: ceil(C / k) of C, padded with
    zeros on the last ranks. In the flat buffer, parameters come before buffers, and copies before
    shards.
    """

    def __init__(
        self,
        local: Sequence[Tensor],  # this rank's tensors, parameters before buffers
        are_shards: Sequence[bool],
        num_parameters: int,  # among the tensors
        within: Channel,
    ) -> None:
        self._within = within
        self._shapes = [tensor.shape for tensor in local]
        self._sizes = [tensor.numel() for tensor in local]
        self._copies = [i for i, is_shard in enumerate(are_shards) if not is_shard]
        shards = [Slice(i, 0, self._sizes[i]) for i, is_shard in enumerate(are_shards) if is_shard]
        self._copied = sum(self._sizes[i] for i in self._copies)

        share = -(-self._copied // within.size)
        mine = self._slices_of_copies(within.rank * share, share)
        # on the last ranks, the share may be smaller: pad it with zeros
        self._padding = share - sum(one.numel for one in mine)

        # the sort is stable: among parameters and among buffers, copies stay before shards
        self._slices = sorted([*mine, *shards], key=lambda one: one.tensor >= num_parameters)
        self._lengths = [one.numel for one in self._slices]
        # S, the values that this rank exchanges, and the parameter values among them: they come
        # first, and include the padding if there are no buffers
        self.numel = self.parameter_numel = sum(self._lengths) + self._padding
        if num_parameters < len(local):
            trained = [one.numel for one in self._slices if one.tensor < num_parameters]
            self.parameter_numel = sum(trained)

    def _slices_of_copies(self, start: int, numel: int) -> list[Slice]:
        """Return the slices with values `start` to `start + numel` of the concatenated copies."""
        slices, begin = [], 0
        for i in self._copies:
            low, high = max(begin, start), min(begin + self._sizes[i], start + numel)
            # a single rank keeps empty tensors too: the optimizer then gets every parameter
            if low < high or self._within.size == 1:
                slices.append(Slice(i, low - begin, high - begin))
            begin += self._sizes[i]
        return slices

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """Copy the values that this rank exchanges into a new fp32 tensor of shape (S,)."""
        pieces = [tensors[i].reshape(-1)[low:high].float() for i, low, high in self._slices]
        return torch.cat([*pieces, torch.zeros(self._padding, device=tensors[0].device)])

    def spans(self, indices: Collection[int]) -> list[slice]:
        """Return the ranges of a flat buffer that belong to the tensors with these indices."""
        ends = list(accumulate(self._lengths))
        return [
            slice(end - one.numel, end)
            for one, end in zip(self._slices, ends, strict=True)
            if one.tensor in indices
        ]

    def split(self, values: Tensor) -> list[tuple[int, Tensor]]:
        """Split a flat buffer into (tensor index, view) pairs, one per slice."""
        # views are flat, except in a single-rank replica, where they have the tensors' shapes
        if not self._lengths:
            return []
        pieces = torch.split(values[: sum(self._lengths)], self._lengths)
        slices = [(one.tensor, piece) for one, piece in zip(self._slices, pieces, strict=True)]
        if self._within.size > 1:
            return slices
        return [(i, piece.view(self._shapes[i])) for i, piece in slices]

    def unflatten(self, values: Tensor, device: torch.device | None = None) -> list[Tensor]:
        """Return the tensors in flat fp32 `values`, (S,), the inverse of `flatten`; collective.

        Collective within the replica. The tensors are views where possible.
        """
        device = device or values.device
        flat: list[Tensor] = [values[:0]] * len(self._sizes)
        slices = self.split(values)
        for i, piece in slices:
            flat[i] = piece

        if self._within.size > 1 and self._copied:
            # every rank has 1/k of the copies; padding is at the end of a share
            copies, zeros = set(self._copies), values.new_zeros(self._padding)
            share = torch.cat([piece for i, piece in slices if i in copies] + [zeros])
            shares = self._within.all_gather(share.to(self._within.device), WITHIN_TAG).wait()
            sizes = [self._sizes[i] for i in self._copies]
            whole = torch.split(shares.view(-1)[: self._copied], sizes)
            for i, piece in zip(self._copies, whole, strict=True):
                flat[i] = piece
        # The host does not wait for an upload from pinned memory. It next writes to that memory
        # when the fragment lands. By then it has waited for the fragment's message, which the
        # device computed after the upload.
        later = device.type == "cuda"
        return [
            piece.to(device, non_blocking=later).view(shape)
            for piece, shape in zip(flat, self._shapes, strict=True)
        ]


class OuterFragment:
    """A fragment's two copies: the module's own tensors (the local copy) and the global copy.

    The outer optimizer gets fp32 tensors with the shapes of the parameters. In a multi-rank
    replica, where each rank holds a shard of the global copy and of the optimizer's state, they are
    flat slices, so the optimizer must be element-wise, like SGD and Adam.
    """

    def __init__(
        self,
        module: nn.Module,
        fragment: Fragment,
        outer_optimizer: OuterOptimizerFactory,
        within: Channel | None = None,
        device: str | None = None,  # of the outer state; None: that of the parameters
        keeps_residual: bool = False,  # keep the codec's rounding error, for error feedback
        buffers: AveragedBuffers | None = None,  # of the whole module; None: of the fragment
    ) -> None:
        self.fragment = fragment
        self._buffers = buffers or AveragedBuffers(module, fragment.buffers)
        self.within = within or Channel([0], 0, Ledger())
        # a submodule that a hook replaces is refused at the next launch (`StreamingDiLoCo`)
        self._owners = [_owner(module, name) for name in fragment.parameters]
        named = [*self._parameters(), *(getattr(*_owner(module, b)) for b in fragment.buffers)]
        are_shards, split = [is_shard(tensor) for tensor in named], len(fragment.parameters)
        self._own = local_tensor if any(are_shards) else Tensor.detach
        self._layout = ShardLayout(self.local, are_shards, split, self.within)
        # S values: first the parameters, sent in the wire format; then the buffers, sent in fp32
        self.shard_numel, self.parameter_numel = self._layout.numel, self._layout.parameter_numel
        start = self.local_values()
        # (parameter_numel,), fp32: the codec's rounding error of the latest outer gradient
        self.residual = torch.zeros_like(start[: self.parameter_numel]) if keeps_residual else None
        self.residual_before: Tensor | None = None
        # (S,), fp32: this rank's values in the order of `ShardLayout`
        self.global_copy = start if device is None else _to_device(start, device)

        slices = self._layout.split(self.global_copy)
        self._outer_parameters = [nn.Parameter(part) for i, part in slices if i < split]
        self._outer_buffers = [part for i, part in slices if i >= split]

        # this rank may hold no parameters, but optimizers do not accept an empty list
        nothing = [nn.Parameter(self.global_copy[:0])]
        self.optimizer, self.scheduler = make_outer_optimizer(
            outer_optimizer, self._outer_parameters or nothing
        )
        self.landings = 0  # updates to the global copy, including the final mean
        self.settled: frozenset[int] = frozenset()  # indices of parameters (`Frozen`)

    @property
    def names(self) -> tuple[Sequence[str], Sequence[str]]:
        """The fragment's parameter names and buffer names, as two sequences."""
        return self.fragment.parameters, self.fragment.buffers

    @property
    def local(self) -> list[Tensor]:
        """The local copy: the module's own tensors, parameters before buffers."""
        # not cached, because a module may replace a buffer, and a parameter's `.data` may change
        buffers = self._buffers.tensors(self.fragment.buffers)
        return [self._own(tensor) for tensor in (*self._parameters(), *buffers)]

    def _parameters(self) -> list[Tensor]:
        return [getattr(owner, name) for owner, name in self._owners]

    # -- the local copy

    def local_values(self, local: Sequence[Tensor] | None = None) -> Tensor:
        """Return this rank's share of the local copy, as a new fp32 tensor of shape (S,)."""
        return self._layout.flatten(self.local if local is None else local)

    def outer_gradient(self, local: Sequence[Tensor] | None = None) -> Tensor:
        """Compute the values to send to the other replicas: a new fp32 tensor of shape (S,).

        For parameters, this is the global copy minus the local copy; for buffers, the local values.
        Pass `local` if the local copy is currently swapped out of the module.
        """
        # buffers are averaged, not stepped, and a rounded difference could give a negative variance
        values = self.local_values(local)
        self.subtract_from(self.global_copy.to(values.device, non_blocking=True), values)
        return values

    def subtract_from(self, outer: Tensor, values: Tensor) -> None:
        """Turn `values`, from `local_values`, into the outer gradient in place: `outer` - `values`.

        `outer` is the global copy. Buffers remain unchanged.
        """
        parameters = values[: self.parameter_numel]
        torch.sub(outer[: self.parameter_numel], parameters, out=parameters)

    def local_equals_shared(self, with_buffers: bool = True) -> bool:
        """Return whether this rank's shares of both copies are equal in the local dtype."""
        local = self.local[: None if with_buffers else len(self.fragment.parameters)]
        here = self._layout.split(self.local_values().to(self.global_copy.device))
        for (i, outer), (_, mine) in zip(self._layout.split(self.global_copy), here, strict=True):
            if i >= len(local):
                break
            ours = outer.to(local[i].dtype).float()
            if not torch.allclose(ours, mine, rtol=0, atol=0, equal_nan=True):
                return False
        return True

    def merge(
        self,
        mix: float,
        buffers: bool = True,
        shown: Tensor | None = None,  # fp32, shape (S,), to use instead of the global copy
        frozen: Frozen = NONE_FROZEN,  # settling: become the global copy; settled: stay
    ) -> None:
        """Update the local copy: local <- mix * local + (1 - mix) * global; collective.

        The arithmetic is in fp32, and the result is rounded once, to the local dtype. If `mix` is 0
        or 1, the result is one of the copies, even if the other one contains NaN. Collective within
        the replica.
        """
        if mix == 1.0 and not frozen.settling:
            return
        split, own = len(self.fragment.parameters), self.local
        shown = self.global_copy if shown is None else shown
        outers = self._layout.unflatten(shown, own[0].device)

        for i, (local, outer) in enumerate(zip(own, outers, strict=True)):
            if i >= split and (not buffers or mix == 1.0):
                break
            own_mix = 0.0 if i in frozen.settling else mix
            if i in frozen.settled or own_mix == 1.0:
                continue
            if own_mix and i < split and local.dtype == torch.float32:
                local.lerp_(outer, 1.0 - own_mix)  # the same bits as below, without a temporary
                continue
            merged = torch.lerp(local.float(), outer, 1.0 - own_mix) if own_mix else outer
            if i >= split:  # constant buffers keep their infinities and their precision
                merged = torch.where(local.float() == outer, local, merged.to(local.dtype))
            local.copy_(merged)

    def keep_outer_gradient(self, before: Tensor, frozen: Frozen = NONE_FROZEN) -> None:
        """Move the local parameters as the global copy has moved since `before`: fp32, shape (S,).

        Collective within the replica. Parameters that settle become the global copy.
        """
        moved = self._layout.unflatten(self.global_copy - before, self.local[0].device)
        split = len(self.fragment.parameters)
        for i, (local, change) in enumerate(zip(self.local[:split], moved[:split], strict=True)):
            if i not in frozen.settling | frozen.settled:
                local.copy_(local.float() + change)
        self.merge(mix=1.0, frozen=frozen)

    def show(self, shown: Tensor | None = None) -> None:
        """Overwrite the local copy with the global copy or with `shown` (fp32, shape (S,)).

        Collective within the replica.
        """
        self.merge(mix=0.0, shown=shown)

    # -- the global copy

    def outer(self) -> list[Tensor]:
        """Return the global copy with the local shapes and dtypes; collective within a replica."""
        outers = self._layout.unflatten(self.global_copy)
        return [outer.to(local.dtype) for outer, local in zip(outers, self.local, strict=True)]

    def digest(self) -> Tensor:
        """Return a hash of the global copy's bits: int64, 0-d."""
        return digest(self.global_copy)

    @property
    def outer_lr(self) -> float:
        """Learning rate of the outer step at the next landing."""
        return float(self.optimizer.param_groups[0]["lr"])

    def outer_step(self, mean_gradient: Tensor, frozen: Frozen = NONE_FROZEN) -> None:
        """Take a step of the outer optimizer with the mean outer gradient: fp32, shape (S,)."""
        for outer, (i, gradient) in zip(
            self._outer_parameters, self._layout.split(mean_gradient), strict=False
        ):
            if i in frozen.settling:
                outer.sub_(gradient)
            elif i not in frozen.settled:  # optimizers skip parameters without a gradient
                outer.grad = gradient

        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.landings += 1
        self.settled = frozen.settled | frozen.settling

    def average_buffers(self, mean_gradient: Tensor) -> None:
        """Overwrite the global copy's buffers with those in the mean outer gradient, shape (S,)."""
        means = [part for _, part in self._layout.split(mean_gradient)][
            len(self._outer_parameters) :
        ]
        for buffer, value in zip(self._outer_buffers, means, strict=True):
            buffer.copy_(value)

    def take_local(self) -> None:
        """Overwrite the global copy with the local copy."""
        self.global_copy.copy_(self.local_values())

    # -- the mean of the local copies

    def mean_local(self, mean_gradient: Tensor, frozen: Frozen = NONE_FROZEN) -> Tensor:
        """Compute the mean of the local copies from the mean outer gradient: fp32, shape (S,)."""
        values, numel = mean_gradient.clone(), self.parameter_numel
        torch.sub(self.global_copy[:numel], values[:numel], out=values[:numel])
        for span in self._layout.spans(frozen.settled):
            values[span] = self.global_copy[span]
        return values

    def take_mean(self, mean_gradient: Tensor | None, frozen: Frozen = NONE_FROZEN) -> None:
        """Set both copies to the mean of the replicas' local copies; no outer step.

        `mean_gradient` is that of outer gradients, or None for a single replica, which keeps its
        local copy. Collective within the replica.
        """
        if mean_gradient is not None:
            self.global_copy.copy_(self.mean_local(mean_gradient, frozen))
            self.merge(mix=0.0)
        # round the global copy to the local dtype too, so that a second call changes nothing
        self.take_local()

        if mean_gradient is None and self.within.size > 1:  # buffers may differ between the ranks
            self.merge(mix=0.0)
        self.clear_residual()
        self.landings += 1

    def clear_residual(self, indices: frozenset[int] | None = None) -> None:
        """Clear the codec's rounding error, of all parameters or of those with these indices."""
        if indices is None:
            self.residual_before = None
        if self.residual is not None:
            for span in [slice(None)] if indices is None else self._layout.spans(indices):
                self.residual[span] = 0.0

    def keep_residual(self) -> None:
        """Save the rounding error before a launch, in case it does not count (`end_launch`)."""
        self.residual_before = None if self.residual is None else self.residual.clone()

    def end_launch(self, counted: bool) -> None:
        """Restore the rounding error from before the launch, unless the launch counted."""
        before, self.residual_before = self.residual_before, None
        if self.residual is not None and before is not None and not counted:
            self.residual.copy_(before)

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Return the global copy and the outer optimizer's state; tensors are not copied."""
        return {
            "global_copy": [part for _, part in self._layout.split(self.global_copy)],
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "landings": self.landings,
            "settled": sorted(self.settled),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state returned by `state_dict`."""
        parts = [part for _, part in self._layout.split(self.global_copy)]
        for part, saved in zip(parts, state["global_copy"], strict=True):
            part.copy_(saved)

        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.landings, self.settled = state["landings"], frozenset(state["settled"])


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule with a tensor, and the tensor's name in it."""
    owner, _, own_name = name.rpartition(".")
    return module.get_submodule(owner), own_name


def _to_device(copy: Tensor, device: str) -> Tensor:
    """Copy a tensor to a device; from a GPU to the host, into pinned memory."""
    on_host = copy.to(device)
    return on_host.pin_memory() if copy.is_cuda and on_host.device.type == "cpu" else on_host
