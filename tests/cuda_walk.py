"""What a training step does on a CUDA device, walked without one.

`FakeTensorMode` computes shapes, dtypes and devices, and no values; it takes a CUDA device in a
build for the CPU too, here the second one, so that a device that is named in the code is found. On
top of it `CudaWalk` sees two kinds of mistakes:

- tensors of two devices meet in one operation: an error, as on a GPU (there, and in fake mode, some
  operations take an index from the CPU: an error here all the same);
- the host waits for the device: `.item()`, `bool(tensor)`, a copy that blocks, a shape that depends
  on values, an event. Each is a `Question`, kept with the place in the code and the step at which
  it was asked, and gets an answer from a table.

Use::

    with CudaWalk(answers={"domino/gradients.py looks_finite": True}) as walk:
        model = walk.on_cuda(make_model())          # built before, on the CPU
        with walk.during("forward"):
            loss = model(torch.empty(2, 9, device=walk.device))
        with walk.during("backward"):
            loss.backward()
    assert walk.asked() == {Question("backward", "domino/gradients.py looks_finite", "value")}

`InstantChannel` stands in for the other ranks. Values are never there: what depends on one goes the
way that the table of answers says. Autocast is off, as on any machine without a device: walk a
model in bfloat16 instead. `torch.device("cuda")` needs its index here: take `walk.device`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_commfree.comm.channel import Pending
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.comm.liveness import PeerWatch

ROOT = Path(__file__).resolve().parents[1]
WALKS = {str(ROOT / "tests" / name) for name in ("cuda_walk.py", "kernels.py", "race_walk.py")}
TORCH = str(Path(torch.__file__).parent)
CPU, CUDA, META = torch.device("cpu"), torch.device("cuda:1"), torch.device("meta")
Module = TypeVar("Module", bound=nn.Module)
aten: Any = torch.ops.aten

# one element, a whole comparison
VALUES = {aten._local_scalar_dense.default, aten.equal.default}
COPIES = {aten._to_copy.default, aten.copy_.default}


class Question(NamedTuple):
    """A place where the host waits for the device.

    Attributes:
        step: what `CudaWalk.during` was told.
        place: file and function that asks, torch's own left out; without "lightning_commfree/".
        kind: "value" | "shape" | "copy down" | "copy up" | "copy up, not pinned" | "wait". The
            last copy does not wait for the device, but the host takes part in all of it.
    """

    step: str
    place: str
    kind: str


class CudaWalk(TorchDispatchMode):
    """In its body there is a CUDA device without values.

    Args:
        answers: to questions, by place: the value of a tensor. The others are answered with True:
            1 as a number, "all of them" where it is a shape.

    Attributes:
        device: to make tensors on.
        questions: all of them, in order.
    """

    device = CUDA

    def __init__(self, answers: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.questions: list[Question] = []
        self._answers = dict(answers or {})
        self._step = ""
        self._outer: ExitStack | None = None
        self._pinned: set[int] = set()  # storages

    def __enter__(self) -> CudaWalk:
        with ExitStack() as outer:
            outer.enter_context(self._installed())
            # a tensor made outside is one of the CPU, and found out where it meets another
            outer.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            self._outer = outer.pop_all()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._outer is not None:
            self._outer.close()

    def _installed(self) -> AbstractContextManager[None]:
        """Return a context manager that puts stand-ins into `torch.cuda`."""
        return _StandIns(self.ask).installed()

    @contextmanager
    def during(self, step: str) -> Iterator[None]:
        """In the body questions belong to `step`."""
        before, self._step = self._step, step
        try:
            yield
        finally:
            self._step = before

    def asked(self) -> set[Question]:
        """Return every question once."""
        return set(self.questions)

    def on_cuda(self, module: Module) -> Module:
        """Put parameters and buffers on the device, in place; tied ones stay tied."""
        moved: dict[Tensor, Tensor] = {}
        for child in module.modules():
            owned: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
            for tensors in owned:
                for name, tensor in tensors.items():
                    if tensor is not None and tensor not in moved:
                        moved[tensor] = self._moved(tensor)
                    tensors[name] = tensor if tensor is None else moved[tensor]
        return module

    def _moved(self, tensor: Tensor) -> Tensor:
        new = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(new, requires_grad=tensor.requires_grad)
        return new

    def ask(self, kind: str) -> Any:
        """Keep a question and return its answer."""
        place = _place(sys._getframe(1))
        self.questions.append(Question(self._step, place, kind))
        return self._answers.get(place, True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.prim.device.default:
            # autograd asks, and would look for streams of a CUDA device
            device = args[0].fake_device
            return META if device.type == "cuda" else device
        if kwargs.get("device") == META:  # autograd makes a tensor like another one
            kwargs["device"] = self.device
        if func is aten.record_stream.default:
            return None
        if kwargs.pop("pin_memory", None) or func is aten._pin_memory.default:
            pinned = _pinned(func, args, kwargs)
            place = pinned.untyped_storage()._cdata
            self._pinned.add(place)
            weakref.finalize(pinned.untyped_storage(), self._pinned.discard, place)
            return pinned
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        return self._compute(func, args, kwargs, tensors)

    def _compute(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        on_cuda = [t for t in tensors if t.device.type == "cuda"]
        if func in COPIES:
            self._ask_of_copy(func, args, kwargs)
        elif on_cuda:
            _refuse_mix(func, tensors)

        if func in VALUES:
            answer = self.ask("value") if on_cuda else True
            return bool(answer) if func is aten.equal.default else _number(args[0], answer)
        shaped = SHAPES.get(func)
        if shaped is not None and (result := shaped(*args, **kwargs)) is not None:
            if on_cuda:
                self.ask("shape")
            return result
        return func(*args, **kwargs)

    def _ask_of_copy(self, func: Any, args: Any, kwargs: Any) -> None:
        if func is aten.copy_.default:
            into, source = args[0].device, args[1]
            waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        else:
            into, source = kwargs.get("device") or args[0].device, args[0]
            waits = not kwargs.get("non_blocking")
        if into.type != source.device.type and waits:
            self.ask("copy down" if into.type == "cpu" else "copy up")
        elif into.type == "cuda" and source.device.type == "cpu" and source.dim():
            is_pinned = source.untyped_storage()._cdata in self._pinned
            _ = is_pinned or self.ask("copy up, not pinned")


def _place(frame: FrameType | None) -> str:
    """Return the place in which `frame` is."""

    def outward() -> Iterator[tuple[str, str]]:
        here = frame
        while here is not None:
            yield here.f_code.co_filename, here.f_code.co_name
            here = here.f_back

    return innermost(outward())


def innermost(frames: Iterable[tuple[str, str]]) -> str:
    """Return file and function of the first frame that is neither torch's nor the walk's own.

    `frames` are names of files and functions, innermost first.
    """
    file, function = next(frame for frame in frames if not _is_passed_over(*frame))
    path = Path(file)
    parts = path.relative_to(ROOT).parts if path.is_relative_to(ROOT) else path.parts
    if "site-packages" in parts:
        parts = parts[parts.index("site-packages") + 1 :]
    if parts[0] == "lightning_commfree":
        parts = parts[1:]
    return f"{'/'.join(parts)} {function}"


def _is_passed_over(file: str, function: str) -> bool:
    # a comprehension is a frame of its own in some Pythons only
    inner = function in ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
    return inner or file in WALKS or file.startswith((TORCH, "<")) or "contextlib" in file


def _refuse_mix(func: Any, tensors: list[Tensor]) -> None:
    """A number without dimensions may come from the CPU: the kernel gets it as an argument."""
    devices = {str(t.device) for t in tensors if t.dim()}
    if len(devices) > 1:
        raise RuntimeError(f"{func} has tensors on {' and '.join(sorted(devices))}")


def _number(tensor: Tensor, answer: Any) -> Any:
    if tensor.dtype == torch.bool:
        return bool(answer)
    return float(answer) if tensor.is_floating_point() else int(answer)


def _pinned(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func is aten._pin_memory.default:
        return torch.empty_like(args[0])
    return func(*args, **kwargs)


# What the result is if all elements are meant, for operations whose shape depends on values.


def _nonzero(tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor.numel(), tensor.dim(), dtype=torch.int64)


def _masked_select(tensor: Tensor, mask: Tensor) -> Tensor:
    return tensor.new_empty(mask.numel())


def _index(tensor: Tensor, indices: list[Tensor | None]) -> Tensor | None:
    masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
    if not masks:
        return None
    assert len(indices) == 1, "a mask stands alone"
    return tensor.new_empty(masks[0].numel(), *tensor.shape[masks[0].dim() :])


def _index_put(tensor: Tensor, indices: list[Tensor | None], *_: Any) -> Tensor | None:
    return None if _index(tensor, indices) is None else tensor


def _unique(tensor: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    places = tensor.new_empty(tensor.shape, dtype=torch.int64)
    counts = tensor.new_empty(tensor.numel(), dtype=torch.int64)
    return tensor.new_empty(tensor.numel()), places, counts


SHAPES: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.index.Tensor: _index,
    aten.index_put_.default: _index_put,
    aten._unique2.default: _unique,
}


class _StandIns:
    """What `torch.cuda` is asked for, where there is no device; waits are questions."""

    def __init__(self, ask: Callable[[str], Any]) -> None:
        self._ask = ask
        self._random = torch.get_rng_state()

    @contextmanager
    def installed(self) -> Iterator[None]:
        ask = self._ask

        class Waits:
            def __init__(self, *_: Any, **__: Any) -> None:
                pass

            def record(self, *_: Any) -> None:
                pass

            def wait_stream(self, _: Any) -> None:
                pass

            def wait_event(self, _: Any) -> None:
                pass

            def query(self) -> bool:
                return True

            def synchronize(self, *_: Any) -> None:
                ask("wait")

        stands: dict[str, Any] = {
            "Stream": Waits,
            "Event": Waits,
            "current_stream": Waits,
            "synchronize": lambda *_: ask("wait"),
            "stream": lambda _: nullcontext(),
            "device": lambda _: nullcontext(),
            "get_rng_state": lambda *_: self._random,
            "set_rng_state": self._set_random,
        }
        with ExitStack() as stack:
            for name, value in stands.items():
                stack.enter_context(patch.object(torch.cuda, name, value))
            # they would say what autograd is told
            for kind in ("cpu", "cuda", "meta"):
                asks = property(lambda tensor, kind=kind: tensor.device.type == kind)
                stack.enter_context(patch.object(FakeTensor, f"is_{kind}", asks, create=True))
            yield

    def _set_random(self, state: Tensor, *_: Any) -> None:
        self._random = state


class InstantChannel:
    """The other ranks of a group: each sends what this one sends, at once.

    Args:
        size: ranks.
        rank: this one's place.
        device: where tensors must be; another one is an error.
    """

    def __init__(self, size: int = 2, rank: int = 0, device: torch.device = CUDA) -> None:
        self.size, self.rank, self.device = size, rank, device
        self.ranks = tuple(range(size))
        self.ledger, self.peers = Ledger(), PeerWatch()

    def all_reduce(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        """Sum over the ranks, in place."""
        return self._launch(lambda: tensor.mul_(self.size), tensor, tensor)

    def all_gather(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        """Collect tensors of shape S as one of shape (size, *S)."""
        received = tensor.new_empty(self.size, *tensor.shape)
        return self._launch(lambda: received.copy_(tensor), tensor, received)

    def all_to_all(self, tensor: Tensor, tag: str) -> Pending[Tensor]:
        """Send each rank a row; every row that comes is this rank's."""
        received = torch.empty_like(tensor)
        return self._launch(lambda: received.copy_(tensor[self.rank]), tensor, received)

    def broadcast(self, tensor: Tensor, tag: str, source: int = 0) -> Pending[Tensor]:
        """Leave `tensor` as it is."""
        return self._launch(lambda: tensor, tensor, tensor)

    def _launch(
        self, work: Callable[[], object], sent: Tensor, received: Tensor
    ) -> Pending[Tensor]:
        assert sent.device == self.device, f"a tensor on {sent.device} is sent on {self.device}"
        work()
        return Pending.here(received)


def is_walked(tensor: Tensor) -> bool:
    """Return whether a tensor is on the device of a walk."""
    return isinstance(tensor, FakeTensor) and tensor.device.type == "cuda"
