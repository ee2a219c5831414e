"""A stack of blocks as one node of autograd, whose inside is a `ScheduleRun`.

The model's own loop calls its blocks one after the other. Under a schedule it calls stand-ins. They
hand the residual stream on, and note what else they get: a kind of block has a mask of its own. The
last one runs the stack. Where all blocks are of one kind it stands alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_commfree.domino.auto_split import TimedRun
from lightning_commfree.domino.micro_sublayer import Arguments
from lightning_commfree.domino.schedule import ScheduleRun


class _Stack(torch.autograd.Function):
    """The whole stack as one node; a `ScheduleRun` computes its inside."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, run: ScheduleRun | TimedRun, arguments: Sequence[Arguments]
    ) -> Tensor:
        ctx.run = run
        return run.forward(hidden, arguments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        if not torch.autograd._is_checkpoint_valid():  # type: ignore[no-untyped-call]
            # the inside would add to the gradients of all parameters, asked for or not
            raise RuntimeError(
                "A model that is divided and scheduled cannot be differentiated by"
                " `torch.autograd.grad` or `backward(inputs=...)`: its blocks run their own"
                " backward, for all parameters. Call `backward()`, or use another strategy."
            )
        return ctx.run.backward(gradients[0]), None, None


def run_schedule(
    run: ScheduleRun | TimedRun, hidden: Tensor, arguments: Sequence[Arguments]
) -> Tensor:
    """Run `hidden`, shape (B, T, H), through the stack.

    Args:
        run: a new one.
        hidden: the residual stream behind the embedding.
        arguments: what transformers passes to each block besides it, by name; one for all of them,
            or one for each.

    Returns:
        The residual stream before the last norm; gradients flow back through it once.
    """
    if not hidden.requires_grad:  # frozen embeddings: the node must be in the graph all the same
        hidden = hidden.detach().requires_grad_()

    output: Tensor = _Stack.apply(hidden, run, arguments)  # type: ignore[no-untyped-call]
    return output


_NOT_FOR_BLOCKS = ("past_key_values", "past_key_value", "layer_past", "use_cache")

RunStack = Callable[[Tensor, nn.Module, Sequence[Arguments]], Tensor]


class _StandIn:
    """What a model's loop gets in place of a block; its attributes are the block's.

    Args:
        block: in whose place it stands.
        noted: what the blocks of this forward have got so far.
        run: runs the stack; None: the stream goes on to the next one.
        as_tensor: a block returns its output as it is, and not in a tuple.
    """

    def __init__(
        self, block: nn.Module, noted: list[Arguments], run: RunStack | None, as_tensor: bool
    ) -> None:
        self._block, self._noted, self._run, self._as_tensor = block, noted, run, as_tensor
        self._signature = inspect.signature(type(block).forward)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Python asks for those of a copy before there is a block
            raise AttributeError(name)
        return getattr(self._block, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> _StandIn:
        return self  # as of a function: a copy of the model is no other rank

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(self._block, hidden, *args, **kwargs).arguments
        extra = {k: v for k, v in bound.items() if k not in ("self", "hidden_states")}
        extra.update(extra.pop("kwargs", {}))
        arguments = {k: v for k, v in extra.items() if k not in _NOT_FOR_BLOCKS}
        self._noted.append({k: v for k, v in arguments.items() if not k.startswith("encoder_")})

        if self._run is not None:
            given = list(self._noted)
            self._noted.clear()  # or a mask would live until the next forward
            hidden = self._run(hidden, self._block, given)
        return hidden if self._as_tensor else (hidden,)


class _ScheduledBlocks(nn.ModuleList):
    """A list of blocks that yields their stand-ins while `active`."""

    active = False
    noted: list[Arguments]
    stand_ins: list[_StandIn]

    def begin(self, active: bool) -> None:
        """A forward begins, with or without the schedule."""
        self.active = active
        self.noted.clear()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stand_ins) if self.active else super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        if self.active and isinstance(index, slice):
            return self.stand_ins
        return super().__getitem__(index)


def become_scheduled(
    blocks: nn.ModuleList, run: RunStack, one_kind: bool, as_tensor: bool
) -> Callable[[], None]:
    """Let a list of blocks yield stand-ins while it is `active`; return what makes it plain again.

    Args:
        blocks: of a model.
        run: runs all of them: given the stream, a block, and what the blocks get besides.
        one_kind: all blocks get the same.
        as_tensor: see `_StandIn`.
    """
    known, noted = list(blocks), list[Arguments]()
    passed = [] if one_kind else [_StandIn(block, noted, None, as_tensor) for block in known[:-1]]
    last = _StandIn(known[0] if one_kind else known[-1], noted, run, as_tensor)

    before, scheduled = type(blocks), cast(_ScheduledBlocks, blocks)
    blocks.__class__ = _ScheduledBlocks
    scheduled.active, scheduled.noted, scheduled.stand_ins = False, noted, [*passed, last]

    def undo() -> None:
        blocks.__class__ = before
        del scheduled.active, scheduled.noted, scheduled.stand_ins

    return undo
