"""How a batch is divided so that one part computes while the other's sums fly.

=========  ======================  ================================================================
split      parts                   what the parts share
=========  ======================  ================================================================
batch      rows of the batch       nothing; they may be of different sizes
token      pieces of the sequence  a later piece attends to the keys and values of the earlier
                                   ones, which therefore go through attention's backward after it
weight     outputs of row linears  the input: each slice's sum flies while the next one is
                                   computed, within a half-block only
none       one                     --
=========  ======================  ================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from lightning_commfree.domino.schedule import Piece

Arguments = dict[str, Any]
Launch = Callable[[Tensor], None]


class Split(Protocol):
    """A way to divide a batch."""

    def cut(self, hidden: Tensor) -> Sequence[Tensor]:
        """Divide a tensor of shape (B, T, H)."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Put together what `cut` divided."""

    def cut_arguments(self, arguments: Arguments, hidden: Tensor) -> list[Arguments]:
        """Divide what transformers passes to a block besides `hidden`."""

    def run(self, piece: Piece, earlier: Sequence[Piece], launch: Launch) -> None:
        """Compute a piece's body on `piece.x`, set its `outputs` and launch its partial sums.

        Args:
            piece: entered.
            earlier: the same half-block of the micro-batches before, computed.
            launch: takes a partial sum whose all-reduce may start.
        """

    def gradients(self, piece: Piece, d_total: Tensor) -> list[Tensor]:
        """Return the gradients of `piece.outputs`, given that of the sum."""


class Whole:
    """No split: every sum is waited for."""

    def cut(self, hidden: Tensor) -> Sequence[Tensor]:
        """See `Split`."""
        return [hidden]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """See `Split`."""
        return parts[0]

    def cut_arguments(self, arguments: Arguments, hidden: Tensor) -> list[Arguments]:
        """See `Split`."""
        del hidden
        return [arguments]

    def run(self, piece: Piece, earlier: Sequence[Piece], launch: Launch) -> None:
        """See `Split`."""
        del earlier
        assert piece.x is not None, "the piece is entered"
        # a view: autocast would keep the half-precision copy of a leaf, and add its gradients there
        partial = piece.half.body(piece.x.view_as(piece.x), piece.arguments)
        piece.outputs = [partial]
        launch(partial)

    def gradients(self, piece: Piece, d_total: Tensor) -> list[Tensor]:
        """See `Split`."""
        del piece
        return [d_total]


class BatchSplit(Whole):
    """Rows of the batch.

    Args:
        parts: micro-batches, at most the rows of a batch.
    """

    def __init__(self, parts: int) -> None:
        self._parts = parts

    def cut(self, hidden: Tensor) -> Sequence[Tensor]:
        """See `Split`."""
        return hidden.tensor_split(self._parts)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """See `Split`."""
        return torch.cat(list(parts))

    def cut_arguments(self, arguments: Arguments, hidden: Tensor) -> list[Arguments]:
        """See `Split`; a tensor without a row per row of the batch goes to all parts."""
        rows = len(hidden)

        def part(value: Any, i: int) -> Any:
            # one dimension: places in the sequence and the like
            if not isinstance(value, Tensor) or value.dim() < 2 or len(value) != rows:
                return value
            return value.tensor_split(self._parts)[i]

        return [
            {
                key: pytree.tree_map(lambda v, i=i: part(v, i), value)
                for key, value in arguments.items()
            }
            for i in range(self._parts)
        ]


class WeightSplit(Whole):
    """Slices of the outputs of every row linear.

    Args:
        parts: slices.
    """

    def __init__(self, parts: int) -> None:
        self._parts = parts

    def run(self, piece: Piece, earlier: Sequence[Piece], launch: Launch) -> None:
        """See `Split`."""
        del earlier
        assert piece.x is not None, "the piece is entered"
        with piece.half.row.sliced(self._parts, launch) as slices:
            piece.half.body(piece.x.view_as(piece.x), piece.arguments)
        piece.outputs = slices

    def gradients(self, piece: Piece, d_total: Tensor) -> list[Tensor]:
        """See `Split`."""
        sizes = [output.shape[-1] for output in piece.outputs]
        return list(torch.split(d_total, sizes, -1))


class TokenSplit:
    """Pieces of the sequence, under causal attention.

    Args:
        parts: pieces, at most the tokens of a sequence.
        flash: attention's implementation knows by itself that the last tokens of keys and queries
            stand side by side.
    """

    def __init__(self, parts: int, flash: bool = False) -> None:
        self._parts, self._flash = parts, flash

    def cut(self, hidden: Tensor) -> Sequence[Tensor]:
        """See `Split`."""
        return hidden.tensor_split(self._parts, dim=1)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """See `Split`."""
        return torch.cat(list(parts), dim=1)

    def cut_arguments(self, arguments: Arguments, hidden: Tensor) -> list[Arguments]:
        """See `Split`; each part's mask covers the tokens before it too."""
        cut, start = [], 0
        for part in self.cut(hidden):
            stop = start + part.shape[1]
            own = {key: self._own(value, start, stop, hidden) for key, value in arguments.items()}
            own["attention_mask"] = self._mask(arguments.get("attention_mask"), start, stop, hidden)
            cut.append(own)
            start = stop
        return cut

    def run(self, piece: Piece, earlier: Sequence[Piece], launch: Launch) -> None:
        """See `Split`."""
        assert piece.x is not None, "the piece is entered"
        arguments: Mapping[str, Any] = piece.arguments
        keys = _Keys([before.shared for before in earlier])
        if piece.half.attention is not None:
            arguments = {**arguments, "past_key_values": keys}
        partial = piece.half.body(piece.x.view_as(piece.x), dict(arguments))
        piece.outputs = [partial, *keys.own]
        piece.shared = [Shared(tensor) for tensor in keys.own]
        launch(partial)

    def gradients(self, piece: Piece, d_total: Tensor) -> list[Tensor]:
        """See `Split`; keys and values have got theirs from the later pieces."""
        return [d_total, *(shared.gradient() for shared in piece.shared)]

    def _own(self, value: Any, start: int, stop: int, hidden: Tensor) -> Any:
        length = hidden.shape[1]

        def part(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.dim() not in (1, 2, 3):
                return leaf
            dim = min(leaf.dim() - 1, 1)  # (T), (B, T), (B, T, D)
            return leaf.narrow(dim, start, stop - start) if leaf.shape[dim] == length else leaf

        return pytree.tree_map(part, value)

    def _mask(self, mask: Tensor | None, start: int, stop: int, hidden: Tensor) -> Tensor | None:
        if mask is None:
            if start == 0 or self._flash:
                return None
            ones = torch.ones(stop - start, stop, dtype=torch.bool, device=hidden.device)
            return ones.tril(start)[None, None]
        return mask[:, :stop] if mask.dim() == 2 else mask[..., start:stop, :stop]


def is_causal(arguments: Mapping[str, Any], config: Any) -> bool:
    """Return whether no token of a batch of one row sees a later one.

    Args:
        arguments: of a block.
        config: of its attention.
    """
    if False in (arguments.get("is_causal"), getattr(config, "is_causal", None)):
        return False
    mask = arguments.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return True
    visible = mask if mask.dtype == torch.bool else mask == 0
    return not bool(visible.triu(1).any())


def is_packed(arguments: Mapping[str, Any]) -> bool:
    """Return whether a row holds several examples, as flash attention is told: without a mask."""
    if arguments.get("cu_seq_lens_q") is not None:
        return True
    positions = arguments.get("position_ids")
    return isinstance(positions, Tensor) and bool((positions.diff(dim=-1) != 1).any())


class Shared:
    """A key or value tensor of one piece, and the leaves that later pieces use in its place."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._lent: list[Tensor] = []

    def lend(self) -> Tensor:
        """Return a leaf with the same values."""
        leaf = self._tensor.detach().requires_grad_()
        self._lent.append(leaf)
        return leaf

    def gradient(self) -> Tensor:
        """Return what the leaves have got in backward."""
        total = torch.zeros_like(self._tensor)
        for leaf in self._lent:
            if leaf.grad is not None:
                total += leaf.grad
        return total


class _Keys:
    """Stands in for a cache of transformers: puts what earlier pieces have in front."""

    def __init__(self, earlier: Sequence[Sequence[Shared]]) -> None:
        self._earlier = earlier
        self.own: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.own = [keys, values]
        whole = []
        for place, own in enumerate(self.own):
            lent = [shared[place].lend() for shared in self._earlier]
            whole.append(torch.cat([*lent, own], dim=-2))
        return whole[0], whole[1]
