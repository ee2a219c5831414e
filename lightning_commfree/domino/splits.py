"""How a batch is split so that one part computes while the other's sums fly.

=========  ======================  ================================================================
split      micro-batches           what they share
=========  ======================  ================================================================
batch      rows of the batch       nothing; they may be of different sizes
token      chunks of the sequence  a later chunk attends to the keys and values of the earlier
                                   ones, which therefore go through attention's backward after it
weight     one                     each slice of a row linear's outputs has a sum of its own, which
                                   flies while the next slice is computed, within a sublayer only
hybrid     rows of the batch       as batch, and each one's sums are sliced as under weight
none       one                     --
=========  ======================  ================================================================

Which split a batch gets: not every batch can be split in the way that was asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_commfree.domino.settings import DominoSettings
from lightning_commfree.domino.sublayers import Arguments, LentTensor, MicroSublayer

Launch = Callable[[Tensor], None]


class Split(Protocol):
    """A way to split a batch into micro-batches."""

    def micro_batches(self, hidden: Tensor) -> Sequence[Tensor]:
        """Split a tensor of shape (B, T, H)."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Put together what `micro_batches` has split."""

    def micro_arguments(self, arguments: Arguments, hidden: Tensor) -> list[Arguments]:
        """Split what transformers passes to a block besides `hidden`."""

    def run(self, micro: MicroSublayer, earlier: Sequence[MicroSublayer], launch: Launch) -> None:
        """Compute a body, set `micro.outputs` and launch its partial sums.

        Args:
            micro: entered.
            earlier: the same sublayer of the micro-batches before, computed.
            launch: takes a partial sum, whose all-reduce may start.
        """

    def gradients(self, micro: MicroSublayer, d_total: Tensor) -> list[Tensor]:
        """Return the gradients of `micro.outputs`, given that of the sum."""


class NoSplit:
    """One micro-batch: every sum is waited for."""

    def micro_batches(self, hidden: Tensor) -> Sequence[Tensor]:
        """See `Split`."""
        return [hidden]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """See `Split`."""
        return parts[0]

    def micro_arguments(self, arguments: Arguments, hidden: Tensor) -> list[Arguments]:
        """See `Split`."""
        del hidden
        return [arguments]

    def run(self, micro: MicroSublayer, earlier: Sequence[MicroSublayer], launch: Launch) -> None:
        """See `Split`."""
        del earlier
        partial = micro.body()
        micro.outputs = [partial]
        launch(partial)

    def gradients(self, micro: MicroSublayer, d_total: Tensor) -> list[Tensor]:
        """See `Split`."""
        del micro
        return [d_total]


class BatchSplit(NoSplit):
    """Rows of the batch.

    Args:
        num_micro_batches: at most the rows of a batch.
    """

    def __init__(self, num_micro_batches: int) -> None:
        self._num_micro_batches = num_micro_batches

    def micro_batches(self, hidden: Tensor) -> Sequence[Tensor]:
        """See `Split`."""
        return hidden.tensor_split(self._num_micro_batches)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """See `Split`."""
        return torch.cat(list(parts))

    def micro_arguments(self, arguments: Arguments, hidden: Tensor) -> list[Arguments]:
        """See `Split`; a tensor without a row per row of the batch goes to all micro-batches."""
        rows = len(hidden)

        def own(value: Any, i: int) -> Any:
            # one dimension: places in the sequence and the like
            if not isinstance(value, Tensor) or value.dim() < 2 or len(value) != rows:
                return value
            return value.tensor_split(self._num_micro_batches)[i]

        return [
            {
                key: pytree.tree_map(lambda v, i=i: own(v, i), value)
                for key, value in arguments.items()
            }
            for i in range(self._num_micro_batches)
        ]


class WeightSplit(NoSplit):
    """Slices of the outputs of every row linear.

    Args:
        num_slices: at most the outputs.
    """

    def __init__(self, num_slices: int) -> None:
        self._num_slices = num_slices

    def run(self, micro: MicroSublayer, earlier: Sequence[MicroSublayer], launch: Launch) -> None:
        """See `Split`."""
        del earlier
        with micro.sublayer.row.sliced(self._num_slices, launch) as slices:
            micro.body()
        micro.outputs = slices

    def gradients(self, micro: MicroSublayer, d_total: Tensor) -> list[Tensor]:
        """See `Split`."""
        sizes = [output.shape[-1] for output in micro.outputs]
        return list(torch.split(d_total, sizes, -1))


class HybridSplit(BatchSplit):
    """Rows of the batch, and of each part slices of the outputs of every row linear.

    Args:
        num_parts: of the rows, and slices of the outputs.
    """

    def __init__(self, num_parts: int) -> None:
        super().__init__(num_parts)
        self._slices = WeightSplit(num_parts)

    def run(self, micro: MicroSublayer, earlier: Sequence[MicroSublayer], launch: Launch) -> None:
        """See `Split`."""
        self._slices.run(micro, earlier, launch)

    def gradients(self, micro: MicroSublayer, d_total: Tensor) -> list[Tensor]:
        """See `Split`."""
        return self._slices.gradients(micro, d_total)


class TokenSplit:
    """Chunks of the sequence, under causal attention.

    Args:
        num_micro_batches: at most the tokens of a sequence.
        flash: attention's implementation knows by itself that the last tokens of keys and queries
            stand side by side.
    """

    def __init__(self, num_micro_batches: int, flash: bool = False) -> None:
        self._num_micro_batches, self._flash = num_micro_batches, flash

    def micro_batches(self, hidden: Tensor) -> Sequence[Tensor]:
        """See `Split`."""
        return hidden.tensor_split(self._num_micro_batches, dim=1)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """See `Split`."""
        return torch.cat(list(parts), dim=1)

    def micro_arguments(self, arguments: Arguments, hidden: Tensor) -> list[Arguments]:
        """See `Split`; each chunk's mask covers the tokens before it too."""
        found, start = [], 0
        for chunk in self.micro_batches(hidden):
            stop = start + chunk.shape[1]
            own = {key: self._own(value, start, stop, hidden) for key, value in arguments.items()}
            own["attention_mask"] = self._mask(arguments.get("attention_mask"), start, stop, hidden)
            found.append(own)
            start = stop
        return found

    def run(self, micro: MicroSublayer, earlier: Sequence[MicroSublayer], launch: Launch) -> None:
        """See `Split`."""
        keys = _KeyCache([before.lent for before in earlier])
        attention = micro.sublayer.attention
        partial = micro.body({} if attention is None else {cache_argument(type(attention)): keys})

        micro.outputs = [partial, *keys.own]
        micro.lent = [LentTensor(tensor) for tensor in keys.own]
        launch(partial)

    def gradients(self, micro: MicroSublayer, d_total: Tensor) -> list[Tensor]:
        """See `Split`; keys and values have got theirs from the later chunks."""
        return [d_total, *(lent.gradient() for lent in micro.lent)]

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
        if mask is None:
            if start == 0 or self._flash:
                return None
            ones = torch.ones(stop - start, stop, dtype=torch.bool, device=hidden.device)
            return ones.tril(start)[None, None]
        return mask[:, :stop] if mask.dim() == 2 else mask[..., start:stop, :stop]


_CACHES = ("past_key_values", "past_key_value")  # the latter in older transformers


def takes_cache(attention: type[nn.Module]) -> bool:
    """Return whether an attention's class takes a cache; see `cache_argument`."""
    return not inspect.signature(attention.forward).parameters.keys().isdisjoint(_CACHES)


def cache_argument(attention: type[nn.Module]) -> str:
    """Return the name of a cache among the arguments of an attention's class.

    An argument by another name would be dropped without a word: chunks would not see each other.

    Raises:
        ValueError: there is none.
    """
    for name in _CACHES:
        if name in inspect.signature(attention.forward).parameters:
            return name
    raise ValueError(
        f"`{attention.__name__}` takes no cache of keys and values, by which the chunks of a"
        " sequence see each other: it cannot be split by tokens. Take another `split`, batches of"
        " two rows or more, or a newer transformers."
    )


class _KeyCache:
    """Stands in for a cache of transformers: puts what earlier chunks have in front."""

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
        settings: what was asked for, or chosen by `auto_split`.
        hidden: of the batch, shape (B, T, H).
        arguments: what transformers passes to a block besides it.
        config: of attention; None if there is none.
        on_fallback: told why the batch is split in another way than asked for.
    """
    rows, tokens = hidden.shape[:2]
    parts, split = settings.num_micro_batches, settings.split
    if split == "hybrid":
        if rows >= 2:
            return HybridSplit(min(parts, rows))
        split = "weight"
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
            "Flash attention is told where the examples of a packed row begin, for queries and"
            " keys alike, and a chunk has fewer queries: the row is split by nothing instead."
        )
    if split == "token" and tokens >= 2:
        return TokenSplit(min(parts, tokens), flash)
    return WeightSplit(parts) if split == "weight" else NoSplit()


def legal_splits(
    hidden: Tensor, arguments: Mapping[str, Any], attention: nn.Module | None
) -> list[str]:
    """Return the ways in which a batch may be split so that its sums are hidden, and "none".

    Args:
        hidden: of the batch, shape (B, T, H).
        arguments: what transformers passes to a block besides it.
        attention: of a block; None if there is none.
    """
    rows, tokens = hidden.shape[:2]
    config = getattr(attention, "config", None)
    packed_for_flash = _is_flash(config) and is_packed(arguments)
    by_token = (
        tokens >= 2
        and (attention is None or takes_cache(type(attention)))
        and not packed_for_flash
        and is_causal(arguments, config)
    )
    by_row = ["batch"] if rows >= 2 else []
    return ["none", *by_row, *(["token"] if by_token else [])]


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


def _is_flash(config: Any) -> bool:
    return "flash" in str(getattr(config, "_attn_implementation", ""))
