"""One fragment's global copy and what a replica does with it (arXiv:2501.18512, Algorithm 2).

Nothing is sent to other replicas here. The global copy is fp32 whatever the parameters are, a
tensor of its own beside them, and changes in `outer_step` only. The mixed local value never becomes
the reference of the next outer gradient: replicas would drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.digest import digest
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.diloco.fragments import Fragment
from lightning_commfree.diloco.settings import OuterOptimizerFactory, make_outer_optimizer
from lightning_commfree.model.shards import is_part, own

WITHIN_TAG = "replica"


class Slice(NamedTuple):
    """Consecutive values of one tensor."""

    tensor: int  # its index
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of values."""
        return self.stop - self.start


class ShardLayout:
    """Which slices of a fragment's tensors this rank exchanges, and their order in a flat tensor.

    The k ranks of a replica hold equal *copies* of a tensor, or a *shard* of it each. A rank
    exchanges its own shards, and of all copies together one k-th: ceil(C / k) of their C values.
    Parameters come before buffers, and slices of copies before shards.

    Args:
        local: the tensors as this rank holds them, parameters before buffers.
        are_shards: which of them are shards.
        num_parameters: how many of them are parameters.
        within: channel between the ranks of the replica.

    Attributes:
        numel: S, the values that this rank exchanges.
        parameter_numel: how many of them come first and are of parameters.
    """

    def __init__(
        self,
        local: Sequence[Tensor],
        are_shards: Sequence[bool],
        num_parameters: int,
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
        # the last rank's share may be shorter than the others': zeros fill it up
        self._fill = share - sum(one.numel for one in mine)

        # stable: among parameters, and among buffers, the slices of copies stay first
        self._slices = sorted([*mine, *shards], key=lambda one: one.tensor >= num_parameters)
        self._lengths = [one.numel for one in self._slices]
        self.numel = self.parameter_numel = sum(self._lengths) + self._fill
        if num_parameters < len(local):
            trained = [one.numel for one in self._slices if one.tensor < num_parameters]
            self.parameter_numel = sum(trained)

    def _slices_of_copies(self, start: int, numel: int) -> list[Slice]:
        """Return the slices that hold values `start` to `start` + `numel` of all copies."""
        slices, begin = [], 0
        for i in self._copies:
            low, high = max(begin, start), min(begin + self._sizes[i], start + numel)
            # a rank that has all copies keeps the empty ones too: the optimizer gets a tensor each
            if low < high or self._within.size == 1:
                slices.append(Slice(i, low - begin, high - begin))
            begin += self._sizes[i]
        return slices

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return what this rank exchanges of such tensors: fp32, shape (S,), new."""
        pieces = [tensors[i].reshape(-1)[low:high].float() for i, low, high in self._slices]
        return torch.cat([*pieces, torch.zeros(self._fill, device=tensors[0].device)])

    def split(self, values: Tensor) -> list[tuple[int, Tensor]]:
        """Split a flat tensor at the borders of the slices: the index of the tensor, and a view.

        A replica of one rank gets whole tensors in their shapes; otherwise slices are flat.
        """
        if not self._lengths:
            return []
        pieces = torch.split(values[: sum(self._lengths)], self._lengths)
        slices = [(one.tensor, piece) for one, piece in zip(self._slices, pieces, strict=True)]
        if self._within.size > 1:
            return slices
        return [(i, piece.view(self._shapes[i])) for i, piece in slices]

    def unflatten(self, values: Tensor, device: torch.device | None = None) -> list[Tensor]:
        """Return the tensors as a rank holds them: the inverse of `flatten` on all ranks together.

        Collective within the replica where there are copies. Views where possible.

        Args:
            values: fp32, shape (S,).
            device: of the result; None: where `values` are.
        """
        device = device or values.device
        flat: list[Tensor] = [values[:0]] * len(self._sizes)
        slices = self.split(values)
        for i, piece in slices:
            flat[i] = piece

        if self._within.size > 1 and self._copied:
            copies, zeros = set(self._copies), values.new_zeros(self._fill)
            share = torch.cat([piece for i, piece in slices if i in copies] + [zeros])
            shares = self._within.all_gather(share.to(self._within.device), WITHIN_TAG).wait()
            sizes = [self._sizes[i] for i in self._copies]
            whole = torch.split(shares.view(-1)[: self._copied], sizes)
            for i, piece in zip(self._copies, whole, strict=True):
                flat[i] = piece
        return [
            piece.to(device).view(shape) for piece, shape in zip(flat, self._shapes, strict=True)
        ]


class OuterFragment:
    """The two copies of a fragment: the module's own tensors and the global copy.

    Args:
        module: the model; its tensors named in `fragment` are the local copy, changed in place.
        fragment: which of them.
        outer_optimizer: makes the outer optimizer from the fragment's global copies: fp32, in the
            parameters' shapes. In a replica of several ranks they are flat slices of them, so that
            an optimizer must treat every element by itself, as SGD and Adam do.
        within: channel between the ranks of the same replica. Each holds one shard of the global
            copy and of the outer optimizer's state; they act together wherever the whole is needed.
        device: where the global copy and the outer optimizer's state live; host memory is pinned
            where there is a CUDA device. None: where the parameters are.
        error_feedback: whether the codec's loss is kept for the next outer gradient.

    Attributes:
        fragment, within: as above.
        global_copy: fp32, shape (S,): this rank's shard of all tensors one after the other,
            parameters before buffers; see `ShardLayout`. `shard_numel` is S.
        parameter_numel: how many of the S values come first and travel in the wire format; those
            behind are buffers, which travel as they are. S in a fragment without buffers.
        optimizer: the outer optimizer; `scheduler` sets its learning rate, if there is one.
        residual: fp32, shape (parameter_numel,): what the codec has lost of the latest outer
            gradient; None without error feedback.
        landings: how often the global copy has changed: by outer steps, and to the mean at an end.

    Raises:
        TypeError: `outer_optimizer` did not return a torch optimizer.
    """

    def __init__(
        self,
        module: nn.Module,
        fragment: Fragment,
        outer_optimizer: OuterOptimizerFactory,
        within: Channel | None = None,
        device: str | None = None,
        error_feedback: bool = False,
    ) -> None:
        self._module, self.fragment = module, fragment
        self.within = within or Channel([0], 0, Ledger())
        named = [_tensor(module, name) for name in (*fragment.parameters, *fragment.buffers)]
        are_shards, split = [is_part(tensor) for tensor in named], len(fragment.parameters)
        self._own = own if any(are_shards) else Tensor.detach
        self._layout = ShardLayout(self.local, are_shards, split, self.within)
        self.shard_numel, self.parameter_numel = self._layout.numel, self._layout.parameter_numel
        start = self.local_values()
        self.residual = torch.zeros_like(start[: self.parameter_numel]) if error_feedback else None
        self.global_copy = start if device is None else _moved(start, device)

        slices = self._layout.split(self.global_copy)
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
        """The module's own tensors, parameters before buffers; looked up at every use.

        A module may put another tensor in a buffer's place, and `.data` of a parameter may change.
        """
        names = [*self.fragment.parameters, *self.fragment.buffers]
        return [self._own(_tensor(self._module, name)) for name in names]

    # -- the local copy

    def local_values(self, local: Sequence[Tensor] | None = None) -> Tensor:
        """Return this rank's shard of the local copy: fp32, shape (S,), a new tensor."""
        return self._layout.flatten(self.local if local is None else local)

    def outer_gradient(self, local: Sequence[Tensor] | None = None) -> Tensor:
        """Return what is sent to the other replicas: fp32, shape (S,), a new tensor.

        For parameters, global copy minus local copy: old minus new. For buffers, the local values
        themselves: they are averaged and not stepped, and a rounded difference could make a
        variance negative. `local` is the local copy where the module holds another one now.
        """
        gradient = self.local_values(local)
        parameters = gradient[: self.parameter_numel]
        outer = self.global_copy[: self.parameter_numel].to(gradient.device, non_blocking=True)
        torch.sub(outer, parameters, out=parameters)
        return gradient

    def is_local(self, buffers: bool = True) -> bool:
        """Return whether the local copy equals the global one in its own dtype."""
        local = self.local[: None if buffers else len(self.fragment.parameters)]
        here = self._layout.split(self.local_values().to(self.global_copy.device))
        for (i, outer), (_, mine) in zip(self._layout.split(self.global_copy), here, strict=True):
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
        outers = self._layout.unflatten(self.global_copy if shown is None else shown, device)

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
        """Set the local copy to the global one, or to `shown`, as `merge` takes it."""
        self.merge(mix=0.0, shown=shown)

    # -- the global copy

    def outer(self) -> list[Tensor]:
        """Return the global copy as tensors like `local`, in their order; views where possible.

        Collective within a replica.
        """
        outers = self._layout.unflatten(self.global_copy)
        return [outer.to(local.dtype) for outer, local in zip(outers, self.local, strict=True)]

    def digest(self) -> Tensor:
        """Return a hash of the global copy's bits: int64, no dimension, never 0 but by chance."""
        return digest(self.global_copy)

    def outer_step(self, mean: Tensor) -> None:
        """Step the outer optimizer on the global copy of the parameters.

        Args:
            mean: the replicas' mean outer gradient, fp32, shape (S,).
        """
        means = [part for _, part in self._layout.split(mean)]
        for outer, gradient in zip(self._outer_parameters, means, strict=False):
            outer.grad = gradient

        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.landings += 1

    def average_buffers(self, mean: Tensor) -> None:
        """Put the replicas' mean of the buffers into the global copy; `mean` as in `outer_step`."""
        means = [part for _, part in self._layout.split(mean)][len(self._outer_parameters) :]
        for buffer, value in zip(self._outer_buffers, means, strict=True):
            buffer.copy_(value)

    def take_local(self) -> None:
        """Make the local copy the global one, before anything has been exchanged."""
        self.global_copy.copy_(self.local_values())

    # -- the mean of the local copies

    def mean_local(self, mean: Tensor) -> Tensor:
        """Return the mean of the replicas' local copies: fp32, shape (S,), new.

        Args:
            mean: of their outer gradients, which are differences to the same global copy.
        """
        values, numel = mean.clone(), self.parameter_numel
        torch.sub(self.global_copy[:numel], values[:numel], out=values[:numel])
        return values

    def take_mean(self, mean: Tensor | None) -> None:
        """Make the mean of the local copies both copies; the outer optimizer has no part in it.

        The global copy then holds what the local one does, rounded to bf16 if that is: a second
        time changes nothing.

        Args:
            mean: of the replicas' outer gradients. None: one replica alone keeps its local copy.
        """
        if mean is not None:
            self.global_copy.copy_(self.mean_local(mean))
            self.merge(mix=0.0)
        self.take_local()

        if mean is None and self.within.size > 1:  # its ranks have buffers of their own
            self.merge(mix=0.0)
        self.forget_loss()
        self.landings += 1

    def forget_loss(self) -> None:
        """Drop what the codec has lost: it belongs to weights that are replaced."""
        if self.residual is not None:
            self.residual.zero_()

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Return the global copy, the outer optimizer's state and the number of landings.

        The tensors are not copies. Those of the global copy have the parameters' shapes where a
        rank holds them whole.
        """
        return {
            "global_copy": [part for _, part in self._layout.split(self.global_copy)],
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "landings": self.landings,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        parts = [part for _, part in self._layout.split(self.global_copy)]
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
