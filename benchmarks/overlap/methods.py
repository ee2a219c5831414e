"""Tensor-parallel training methods compared by `benchmarks.overlap`.

Each has its own Llama with the same random weights, and takes the same step: forward with the loss,
backward, AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, linear
from torch.profiler import record_function
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.domino import DominoSettings, ParallelModel
from lightning_commfree.domino.layers import ColumnLinear, RowLinear

LABELS = {
    "none": "no communication",
    "none_split": "no communication, batch split in two",
    "sync": "synchronous",
    "unsplit": 'Domino (`split="none"`)',
    "batch": 'Domino (`split="batch"`)',
    "batch_late": 'Domino (`split="batch"`), launch after the gradients of weights',
    "batch_4": 'Domino (`split="batch"`, 4 micro-batches)',
    "token": 'Domino (`split="token"`)',
    "weight": 'Domino (`split="weight"`)',
    "hybrid": 'Domino (`split="hybrid"`)',
    "torch": "PyTorch's `parallelize_module`",
    "transformers": "transformers' `tp_plan`",
}
SETTINGS = {
    "none": DominoSettings(split="none"),
    "none_split": DominoSettings(split="batch"),
    "sync": DominoSettings(split="none"),
    "unsplit": DominoSettings(split="none"),
    "batch": DominoSettings(split="batch"),
    "batch_late": DominoSettings(split="batch"),
    "batch_4": DominoSettings(split="batch", num_micro_batches=4),
    "token": DominoSettings(split="token"),
    "weight": DominoSettings(split="weight"),
    "hybrid": DominoSettings(split="hybrid"),
}
SILENT = ("none", "none_split")
LATE = ("sync", "batch_late")  # a sublayer's backward launches dx after the gradients of weights


@dataclass(frozen=True)
class Model:
    """Sizes of a Llama."""

    hidden: int = 512
    layers: int = 4
    heads: int = 8
    vocabulary: int = 4096
    positions: int = 128

    def build(self) -> LlamaForCausalLM:
        """Return the model, with the same random weights at every call."""
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4,  # Llama 2's 11008 / 4096, about
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=self.positions,
            use_cache=False,
        )
        return LlamaForCausalLM(config)


@dataclass
class Method:
    """A training method.

    Attributes:
        name: a key of `LABELS`.
        model: the sharded model.
        loss: computes the loss of tokens, int64 of shape (B, T).
        around: context of the forward and backward pass.
        ledger: of its channel; None for PyTorch and transformers.
        parallel: the scheduled model; None for PyTorch and transformers.
    """

    name: str
    model: nn.Module
    loss: Callable[[Tensor], Tensor]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    ledger: Ledger | None = None
    parallel: ParallelModel | None = None
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        # fused: one pass over plain tensors as over DTensor shards, so that the optimizer takes the
        # same time for every method; a group must contain tensors of one kind
        kinds: dict[bool, list[nn.Parameter]] = {}
        for parameter in self.model.parameters():
            kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
        groups = [{"params": parameters} for parameters in kinds.values()]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)

    def step(self, tokens: Tensor) -> float:
        """Take one step and return the loss before it."""
        with self.around():
            with record_function("forward"):
                loss = self.loss(tokens)
            with record_function("backward"):
                loss.backward()
        with record_function("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach().item()


def ours(name: str, model: LlamaForCausalLM, channel: Channel) -> Method:
    """Return one of this library's methods over `channel`."""
    parallel = ParallelModel(model, channel, SETTINGS[name])
    if name in LATE:
        _launch_late(model)
    model.train()

    def loss(tokens: Tensor) -> Tensor:
        return model(input_ids=tokens, labels=tokens).loss

    return Method(name, model, loss, ledger=channel.ledger, parallel=parallel)


def _launch_late(model: nn.Module) -> None:
    """Let autograd compute the gradients of weights together with dx, before its all-reduce."""
    for module in model.modules():
        if isinstance(module, ColumnLinear | RowLinear):
            vars(module)["product"] = linear  # in place of the method; weights are not transposed


def by_torch(model: LlamaForCausalLM, mesh: DeviceMesh) -> Method:
    """Return PyTorch's method with its best plan.

    The input of attention and MLP becomes a DTensor once, so its gradient is all-reduced once for
    q, k, v and once for gate, up. The loss is computed from sharded logits.
    """
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "model.layers.*.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Replicate()},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "model.layers.*.mlp": PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
        ),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    model.train()

    def loss(tokens: Tensor) -> Tensor:
        logits = model(input_ids=tokens).logits
        return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return Method("torch", model, loss, around=loss_parallel)


def by_transformers(model: LlamaForCausalLM, mesh: DeviceMesh) -> Method:
    """Return transformers' method, which `from_pretrained` applies by the plan in the config.

    It is applied to a model in memory, because `from_pretrained` with a plan requires the package
    accelerate.
    """
    # imported here because it is new in transformers 5, and the other methods work without it
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(dict(model.tp_plan)))
    model.train()

    def loss(tokens: Tensor) -> Tensor:
        return model(input_ids=tokens, labels=tokens).loss

    return Method("transformers", model, loss)


def batch_of(shape: Sequence[int], vocabulary: int) -> Tensor:
    """Return random tokens, the same on every rank."""
    return torch.randint(vocabulary, tuple(shape), generator=torch.Generator().manual_seed(1))
