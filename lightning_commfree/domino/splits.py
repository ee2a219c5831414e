"""Split a batch so that one part computes while the other's all-reduce is in flight.

=========  ======================  ================================================================
split      micro-batches           dependence between them
=========  ======================  ================================================================
batch      rows of the batch       none; they may have different sizes
token      chunks of the sequence  a later chunk attends to the keys and values of the earlier
                                   ones, so its attention's backward runs before theirs
weight     one                     each slice of a row linear's outputs has an all-reduce of its
                                   own, which overlaps with the next slice in the same sublayer only
hybrid     rows of the batch       as batch, and each micro-batch's sums are sliced as under weight
none       one                     --
=========  ======================  ================================================================

Not every batch can be split as requested: `choose_split` falls back and says why.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_commfree.domino.settings import DominoSettings
from lightning_commfree.domino.sublayers import Arguments, LentTensor, MicroSublayer

Launch = Callable[[Tensor], None]


class Split:
    """No split: one micro-batch, with one all-reduce a sublayer. Base of the other splits.

    Args:
        num_slices: of the outputs of every row linear, each with an all-reduce of its own.
    """

    def __init__(self, num_slices: int = 1) -> None:
        self._num_slices = num_slices

    def micro_batches(self, hidden: Tensor) -> Sequence[Tensor]:
        """Split a tensor of shape (B, T, H)."""
        return [hidden]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate the parts that `micro_batches` returned."""
        return parts[0]

    def micro_arguments(self, arguments: Arguments, hidden: Tensor) -> list[Arguments]:
        """Split the other arguments that transformers passes to a block with `hidden`."""
        del hidden
        return [arguments]

    def run(self, micro: MicroSublayer, earlier: Sequence[MicroSublayer], launch: Launch) -> None:
        """Compute a body, set `micro.outputs` and launch its partial sums.

        Args:
            micro: entered.
            earlier: the same sublayer of the previous micro-batches, computed.
            launch: takes a partial sum, whose all-reduce may start.
        """
        del earlier
        if self._num_slices > 1:
            with micro.sublayer.row.sliced(self._num_slices, launch) as slices:
                micro.body()
            micro.outputs = slices
        else:
            micro.outputs = [micro.body()]
            launch(micro.outputs[0])

    def gradients(self, micro: MicroSublayer, d_total: Tensor) -> list[Tensor]:
        """Return the gradients of `micro.outputs`, given the gradient of the sum."""
        return list(torch.split(d_total, [output.shape[-1] for output in micro.outputs], -1))


class BatchSplit(Split):
    """Split the rows of a batch.

    Args:
        num_micro_batches: at most the rows of a batch.
        num_slices: see `Split`.
    """

    def __init__(self, num_micro_batches: int, num_slices: int = 1) -> None:
        super().__init__(num_slices)
        self._num_micro_batches = num_micro_batches

    @override
    def micro_batches(self, hidden: Tensor) -> Sequence[Tensor]:
        return hidden.tensor_split(self._num_micro_batches)

    @override
    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))

    @override
    def micro_arguments(self, arguments: Arguments, hidden: Tensor) -> list[Arguments]:
        rows = len(hidden)

        def own(value: Any, i: int) -> Any:
            # positions of shape (1, T) or (T) hold for all rows, and go to all micro-batches
            if not isinstance(value, Tensor) or value.dim() < 2 or len(value) != rows:
                return value
            return value.tensor_split(self._num_micro_batches)[i]

        return [
            {
                # a tree: transformers passes (cos, sin) of rotary positions as a tuple
                key: pytree.tree_map(lambda v, i=i: own(v, i), value)
                for key, value in arguments.items()
            }
            for i in range(self._num_micro_batches)
        ]


class TokenSplit(Split):
    """Split the sequence into chunks, under causal attention.

    Args:
        num_micro_batches: at most the tokens of a sequence.
        flash: attention is flash attention, which aligns the last query with the last key by
            itself and takes no mask for it.
    """

    def __init__(self, num_micro_batches: int, flash: bool = False) -> None:
        super().__init__()
        self._num_micro_batches, self._flash = num_micro_batches, flash

    @override
    def micro_batches(self, hidden: Tensor) -> Sequence[Tensor]:
        return hidden.tensor_split(self._num_micro_batches, dim=1)

    @override
    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), dim=1)

    @override
    def micro_arguments(self, arguments: Arguments, hidden: Tensor) -> list[Arguments]:
        found, start = [], 0
        for chunk in self.micro_batches(hidden):
            stop = start + chunk.shape[1]
            own = {key: self._own(value, start, stop, hidden) for key, value in arguments.items()}
            own["attention_mask"] = self._mask(arguments.get("attention_mask"), start, stop, hidden)
            found.append(own)
            start = stop
        return found

    @override
    def run(self, micro: MicroSublayer, earlier: Sequence[MicroSublayer], launch: Launch) -> None:
        keys = _KeyCache([before.lent for before in earlier])
        more: Arguments = {}
        if micro.sublayer.attention is not None:
            more = {self._cache_argument(type(micro.sublayer.attention)): keys}
        partial = micro.body(more)

        micro.outputs = [partial, *keys.own]
        micro.lent = [LentTensor(tensor) for tensor in keys.own]
        launch(partial)

    @override
    def gradients(self, micro: MicroSublayer, d_total: Tensor) -> list[Tensor]:
        # the later chunks, whose backward has run, have left the gradients of keys and values
        return [d_total, *(lent.gradient() for lent in micro.lent)]

    def _cache_argument(self, attention: type[nn.Module]) -> str:
        name = cache_argument(attention)
        if name is None:  # under another name it would be ignored: chunks would not see each other
            raise ValueError(
                f"`{attention.__name__}` takes no cache of keys and values, by which the chunks of"
                " a sequence see each other: it cannot be split by tokens. Choose another `split`,"
                " batches of two rows or more, or a newer transformers."
            )
        return name

    def _own(self, value: Any, start: int, stop: int, hidden: Tensor) -> Any:
        length = hidden.shape[1]

        def chunk(tensor: Any) -> Any:
            if not isinstance(tensor, Tensor) or tensor.dim() not in (1, 2, 3):
                return tensor
            dim = min(tensor.dim() - 1, 1)  # (T), (B, T), (B, T, D)
            of_tokens = tensor.shape[dim] == length
            return tensor.narrow(dim, start, stop - start) if of_tokens else tensor

        return pytree.tree_map(chunk, value)

    def _mask(self, mask: Tensor | None, start: int, stop: int, hidden: Tensor) -> Tensor | None:
        """Return a chunk's mask, which covers the tokens before it too."""
        if mask is None:
            if start == 0 or self._flash:  # plain causal attention is right without a mask
                return None
            ones = torch.ones(stop - start, stop, dtype=torch.bool, device=hidden.device)
            return ones.tril(start)[None, None]
        return mask[:, :stop] if mask.dim() == 2 else mask[..., start:stop, :stop]


_CACHES = ("past_key_values", "past_key_value")  # the latter in older transformers


def cache_argument(attention: type[nn.Module]) -> str | None:
    """Return the name of an attention class's argument for a cache; None if it takes none."""
    parameters = inspect.signature(attention.forward).parameters
    return next((name for name in _CACHES if name in parameters), None)


class _KeyCache:
    """A cache in transformers' sense that prepends the keys and values of earlier chunks."""

    def __init__(self, earlier: Sequence[Sequence[LentTensor]]) -> None:
        self._earlier = earlier
        self.own: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.own = [keys, values]
        whole = []
        for place, own in enumerate(self.own):
            lent = [tensors[place].lend() for tensors in self._earlier]
            whole.append(torch.cat([*lent, own], dim=-2))
        return whole[0], whole[1]


def choose_split(
    settings: DominoSettings,
    hidden: Tensor,
    arguments: Mapping[str, Any],
    config: Any,
    on_fallback: Callable[[str], None],
) -> Split:
    """Return the split of one batch.

    Args:
        settings: as requested, or with the split that `auto_split` chose.
        hidden: of the batch, shape (B, T, H).
        arguments: others that transformers passes to a block.
        config: of attention; None if there is none.
        on_fallback: called with the reason if the batch cannot be split as requested.
    """
    # a fallback is chosen from the batch alone, so all ranks of a tensor group choose the same
    rows, tokens = hidden.shape[:2]
    parts, split = settings.num_micro_batches, settings.split
    if split == "hybrid":
        if rows >= 2:
            return BatchSplit(min(parts, rows), num_slices=min(parts, rows))
        split = "weight"  # the half of hybrid that one row allows
        on_fallback(
            f"A batch of {rows} cannot be split by rows (`split='hybrid'`); only the outputs of row"
            " linears are."
        )
    if split == "batch" and rows < 2:
        split = "token" if tokens >= 2 and is_causal(arguments, config) else "none"
        on_fallback(
            f"A batch of {rows} cannot be split by rows (`split='batch'`); it is split by"
            f" {'tokens' if split == 'token' else 'nothing'} instead."
        )
    if split == "batch":
        return BatchSplit(min(parts, rows))

    flash = _is_flash(config)
    if split == "token" and flash and is_packed(arguments):
        split = "none"
        on_fallback(
            "Flash attention takes one list of the starts of a packed row's examples for queries"
            " and keys, and a chunk has fewer queries than keys: the row is split by nothing"
            " instead."
        )
    if split == "token" and tokens >= 2:
        return TokenSplit(min(parts, tokens), flash)
    return Split(num_slices=parts if split == "weight" else 1)


def legal_splits(
    hidden: Tensor, arguments: Mapping[str, Any], attention: nn.Module | None
) -> list[str]:
    """Return the splits that a batch allows among "none", "batch" and "token".

    Args:
        hidden: of the batch, shape (B, T, H).
        arguments: others that transformers passes to a block.
        attention: of a block; None if there is none.
    """
    rows, tokens = hidden.shape[:2]
    config = getattr(attention, "config", None)
    packed_for_flash = _is_flash(config) and is_packed(arguments)
    by_token = (
        tokens >= 2
        and (attention is None or cache_argument(type(attention)) is not None)
        and not packed_for_flash
        and is_causal(arguments, config)
    )
    by_row = ["batch"] if rows >= 2 else []
    return ["none", *by_row, *(["token"] if by_token else [])]


def is_causal(arguments: Mapping[str, Any], config: Any) -> bool:
    """Return whether no token attends to a later one, by a block's arguments and config."""
    if False in (arguments.get("is_causal"), getattr(config, "is_causal", None)):
        return False
    mask = arguments.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 4:  # padding alone leaves attention causal
        return True
    visible = mask if mask.dtype == torch.bool else mask == 0
    return not bool(visible.triu(1).any())


def is_packed(arguments: Mapping[str, Any]) -> bool:
    """Return whether a row holds several examples, as flash attention marks them without a mask."""
    if arguments.get("cu_seq_lens_q") is not None:
        return True
    positions = arguments.get("position_ids")  # they start again with each example
    return isinstance(positions, Tensor) and bool((positions.diff(dim=-1) != 1).any())


def _is_flash(config: Any) -> bool:
    return "flash" in str(getattr(config, "_attn_implementation", ""))
