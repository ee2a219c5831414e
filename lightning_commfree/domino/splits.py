"""Split a batch into micro-batches, so that one is computed during the all-reduce of another.

=========  ======================  ================================================================
split      micro-batches           dependencies between them
=========  ======================  ================================================================
batch      rows of the batch       none; they may have different sizes
token      chunks of the sequence  a later chunk attends to the keys and values of earlier ones,
                                   so its attention's backward pass runs first
weight     one                     each slice of a row linear's outputs has its own all-reduce,
                                   which overlaps only with the next slice of the same sublayer
hybrid     rows of the batch       as for batch; each micro-batch's sums are sliced as for weight
none       one                     --
=========  ======================  ================================================================

Not every batch can be split as requested; `choose_split` then falls back and reports why.
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
from lightning_commfree.domino.sublayers import Arguments, MicroSublayer, ReusedTensor

Launch = Callable[[Tensor], None]


class Split:
    """Base class of all splits; used directly, it keeps the batch as a single micro-batch."""

    def __init__(self, num_slices: int = 1) -> None:
        # of each row-parallel linear's outputs, each with its own all-reduce
        self._num_slices = num_slices

    def micro_batches(self, hidden: Tensor) -> Sequence[Tensor]:
        """Split a tensor of shape (B, T, H) into micro-batches."""
        return [hidden]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate the micro-batches returned by `micro_batches`."""
        return parts[0]

    def micro_arguments(self, arguments: Arguments, hidden: Tensor) -> list[Arguments]:
        """Split a block's arguments, such as masks; return one dict per micro-batch.

        `hidden` is the full batch's input of the first block, shape (B, T, H).
        """
        del hidden
        return [arguments]

    def run(self, micro: MicroSublayer, earlier: Sequence[MicroSublayer], launch: Launch) -> None:
        """Compute a sublayer's body into `micro.outputs`, and launch the all-reduces.

        `earlier` is the same sublayer of the previous micro-batches, whose keys it may read.
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
        """Return the gradients of `micro.outputs`, given the gradient of the all-reduced sum."""
        return list(torch.split(d_total, [output.shape[-1] for output in micro.outputs], -1))


class BatchSplit(Split):
    """Split a batch by rows; there are at most as many micro-batches as rows."""

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

        def own_rows(value: Any, i: int) -> Any:
            # positions of shape (1, T) or (T) are valid for all rows: every micro-batch gets them
            if not isinstance(value, Tensor) or value.dim() < 2 or len(value) != rows:
                return value
            return value.tensor_split(self._num_micro_batches)[i]

        return [
            {
                # tree_map, because transformers passes rotary (cos, sin) as a tuple
                key: pytree.tree_map(lambda v, i=i: own_rows(v, i), value)
                for key, value in arguments.items()
            }
            for i in range(self._num_micro_batches)
        ]


class TokenSplit(Split):
    """Split each sequence into chunks, at most as many as tokens; requires causal attention."""

    def __init__(self, num_micro_batches: int, flash: bool = False) -> None:
        super().__init__()
        # flash attention aligns the last query with the last key, and needs no mask
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
            own = {key: self._cut(value, start, stop, hidden) for key, value in arguments.items()}
            own["attention_mask"] = self._mask(arguments.get("attention_mask"), start, stop, hidden)
            found.append(own)
            start = stop
        return found

    @override
    def run(self, micro: MicroSublayer, earlier: Sequence[MicroSublayer], launch: Launch) -> None:
        """Compute the body with the keys and values of earlier chunks; launch its all-reduce."""
        keys = _KeyCache([before.reused for before in earlier])
        more: Arguments = {}
        if micro.sublayer.attention is not None:
            more = {self._require_cache_argument(type(micro.sublayer.attention)): keys}
        partial = micro.body(more)

        micro.outputs = [partial, *keys.own]
        micro.reused = [ReusedTensor(tensor) for tensor in keys.own]
        launch(partial)

    @override
    def gradients(self, micro: MicroSublayer, d_total: Tensor) -> list[Tensor]:
        """Return `d_total`, then the gradients of keys and values, summed over later chunks."""
        # later chunks have already run backward and accumulated these gradients
        return [d_total, *(tensor.gradient() for tensor in micro.reused)]

    def _require_cache_argument(self, attention: type[nn.Module]) -> str:
        """Return the name of the KV cache argument; raise a `ValueError` if there is none."""
        name = cache_argument(attention)
        # a cache under an unknown name would be ignored, and each chunk would see only itself
        if name is None:
            raise ValueError(
                f"`{attention.__name__}` does not accept a KV cache, which"
                " `split='token'` needs so that a chunk can attend to earlier ones. Choose another"
                " `split`, use batches of at least two rows, or install a newer version of"
                " transformers."
            )
        return name

    def _cut(self, value: Any, start: int, stop: int, hidden: Tensor) -> Any:
        """Return a nested value whose tensors with one entry per token are cut to a chunk."""
        length = hidden.shape[1]

        def chunk(tensor: Any) -> Any:
            if not isinstance(tensor, Tensor) or tensor.dim() not in (1, 2, 3):
                return tensor
            dim = min(tensor.dim() - 1, 1)  # (T), (B, T), (B, T, D)
            of_tokens = tensor.shape[dim] == length
            return tensor.narrow(dim, start, stop - start) if of_tokens else tensor

        return pytree.tree_map(chunk, value)

    def _mask(self, mask: Tensor | None, start: int, stop: int, hidden: Tensor) -> Tensor | None:
        """Return the mask for a chunk's queries and keys up to its end, or None if not needed."""
        if mask is None:
            if start == 0 or self._flash:  # correct without a mask, because attention is causal
                return None
            ones = torch.ones(stop - start, stop, dtype=torch.bool, device=hidden.device)
            return ones.tril(start)[None, None]
        return mask[:, :stop] if mask.dim() == 2 else mask[..., start:stop, :stop]


_CACHES = ("past_key_values", "past_key_value")  # the latter in older transformers


def cache_argument(attention: type[nn.Module]) -> str | None:
    """Return the name of an attention class's KV cache argument, or None if it has none."""
    parameters = inspect.signature(attention.forward).parameters
    return next((name for name in _CACHES if name in parameters), None)


class _KeyCache:
    """Substitute for transformers' KV cache that prepends keys and values of earlier chunks."""

    def __init__(self, earlier: Sequence[Sequence[ReusedTensor]]) -> None:
        self._earlier = earlier
        self.own: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keep a chunk's keys and values; return them after those of earlier chunks."""
        self.own = [keys, values]
        joined = []
        for index, own in enumerate(self.own):
            before = [tensors[index].new_leaf() for tensors in self._earlier]
            joined.append(torch.cat([*before, own], dim=-2))
        return joined[0], joined[1]


def choose_split(
    settings: DominoSettings,  # with the choice of `auto_split` in place of "auto"
    hidden: Tensor,  # (B, T, H)
    arguments: Mapping[str, Any],  # of a block
    config: Any,  # of the attention module; None if it has none
    on_fallback: Callable[[str], None],  # gets the reason if the batch cannot be split as requested
) -> Split:
    """Return the split for a batch; call `on_fallback` if it is not the requested one."""
    # the choice depends only on the batch, so all ranks of a tensor group make the same one
    rows, tokens = hidden.shape[:2]
    parts, split = settings.num_micro_batches, settings.split
    if split == "hybrid":
        if rows >= 2:
            return BatchSplit(min(parts, rows), num_slices=min(parts, rows))
        split = "weight"  # the part of hybrid that works with one row
        on_fallback(
            f"A batch of {rows} cannot be split by rows (`split='hybrid'`): using `split='weight'`"
            " for it."
        )
    if split == "batch" and rows < 2:
        split = "token" if tokens >= 2 and is_causal(arguments, config) else "none"
        on_fallback(
            f"A batch of {rows} cannot be split by rows (`split='batch'`): using `split={split!r}`"
            " for it."
        )
    if split == "batch":
        return BatchSplit(min(parts, rows))

    flash = _is_flash(config)
    if split == "token" and flash and is_packed(arguments):
        split = "none"
        on_fallback(
            "A packed row cannot be split by tokens with flash attention: it takes one list of"
            " example starts for queries and keys, but a chunk has fewer queries than keys. Using"
            " `split='none'` for it."
        )
    if split == "token" and tokens >= 2:
        return TokenSplit(min(parts, tokens), flash)
    return Split(num_slices=parts if split == "weight" else 1)


def legal_splits(
    hidden: Tensor,  # (B, T, H)
    arguments: Mapping[str, Any],  # of a block
    attention: nn.Module | None,
) -> list[str]:
    """Return which of the splits "none", "batch" and "token" are possible for a batch."""
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
    """Return whether attention is causal, according to a block's arguments and config."""
    if False in (arguments.get("is_causal"), getattr(config, "is_causal", None)):
        return False
    mask = arguments.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 4:  # padding alone leaves attention causal
        return True
    visible = mask if mask.dtype == torch.bool else mask == 0
    return not bool(visible.triu(1).any())


def is_packed(arguments: Mapping[str, Any]) -> bool:
    """Return whether rows contain packed examples, judging by `cu_seq_lens_q` or `position_ids`."""
    if arguments.get("cu_seq_lens_q") is not None:
        return True
    positions = arguments.get("position_ids")  # start at 0 in each example
    return isinstance(positions, Tensor) and bool((positions.diff(dim=-1) != 1).any())


def _is_flash(config: Any) -> bool:
    return "flash" in str(getattr(config, "_attn_implementation", ""))
