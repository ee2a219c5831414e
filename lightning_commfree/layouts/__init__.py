"""How the ranks of one replica hold a model.

ddp               the full model on every rank
fully_shard       shards of it, as FSDP2 holds them; `fsdp` shards a module, without Lightning
tensor_parallel   parts of every layer, with the all-reduces of `domino` hidden
sharded           what both sharded layouts have in common

Each implements the contract `fit.contracts.Layout`. To add a layout, write one more file, select it
in `choose_layout`, and give it a name that tells whether a fit may resume (`layout_name`).
"""

from __future__ import annotations

from dataclasses import replace

from lightning_commfree.comm.job import REPLICA
from lightning_commfree.domino import DominoSettings
from lightning_commfree.fit.contracts import Layout
from lightning_commfree.layouts.ddp import DataParallel
from lightning_commfree.layouts.fsdp import FSDPSettings
from lightning_commfree.layouts.fully_shard import FullyShard
from lightning_commfree.layouts.tensor_parallel import TensorParallel

__all__ = [
    "DataParallel",
    "FSDPSettings",
    "FullyShard",
    "TensorParallel",
    "choose_layout",
    "layout_name",
]


_SETTINGS = {"fsdp": FSDPSettings(), "domino": DominoSettings()}


def layout_name(inside: str | FSDPSettings | DominoSettings) -> str | DominoSettings:
    """Return the value that identifies a layout when ranks or resumed fits compare settings.

    FSDP's settings are left out, because a resumed fit may change them.
    """
    return "fsdp" if isinstance(inside, FSDPSettings) else inside


def choose_layout(inside: str | FSDPSettings | DominoSettings, size: int, argument: str) -> Layout:
    """Return the layout that a strategy's argument `inside` selects.

    `size` is the number of ranks in a replica, and `argument` is the name of the strategy's
    argument that sets it, used in error messages. A wrong name or size raises a `ValueError`.
    """
    if inside == "ddp":
        return DataParallel(size, argument)
    settings = _SETTINGS.get(inside, inside) if isinstance(inside, str) else inside
    if not isinstance(settings, FSDPSettings | DominoSettings):
        raise ValueError(
            f"`inside={inside!r}` is not valid. Choose 'ddp' (every rank of a replica holds the"
            " full model), 'fsdp' or an `FSDPSettings` (parameters are sharded), or 'domino' or a"
            " `DominoSettings` (tensor parallelism in every layer)."
        )
    if size < 2:
        raise ValueError(
            f"`inside={inside!r}` shards a model over several ranks, but with `{argument}={size}` a"
            f" replica has only one. Set `{argument}` to the number of ranks in a replica, or leave"
            " `inside` at 'ddp'."
        )
    if isinstance(settings, FSDPSettings):
        return FullyShard(size, argument, settings)
    return TensorParallel(replace(settings, tensor_parallel_size=size), argument, REPLICA)
