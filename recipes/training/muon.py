"""Muon for the matrices of hidden layers and AdamW for everything else, as one optimizer.

Muon orthogonalizes the momentum of a matrix by a Newton-Schulz iteration (arXiv:2502.16982), so it
needs whole matrices: a shard of one would take another step. Inside DiLoCo it is MuLoCo
(arXiv:2505.23725). `docs/tuning.md` shows both for a module of your own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from pydantic import NonNegativeFloat, NonNegativeInt
from torch import nn
from torch.optim import AdamW, Optimizer

from recipes.configuration.ranges import Fraction, FractionBelowOne
from recipes.training.optimizer import (
    decay_groups,
    fuse_on_cuda,
    hidden_matrices,
    warmup_cosine,
)


class MuonAdamW(Optimizer):
    """Muon for matrices and AdamW for other parameters, in the groups of one optimizer.

    `torch.optim.Muon` and `torch.optim.AdamW` take the steps, each on its own groups; those of Muon
    are the ones with the key "ns_steps". A group that is added later is AdamW's. The update of a
    matrix of shape (rows, columns) is scaled by 0.2 sqrt(max(rows, columns)) to the root mean
    square of AdamW's (arXiv:2502.16982, equation 4), so a learning rate and a weight decay that
    were tuned for AdamW are a good first guess for both.

    Args:
        matrices: parameters of hidden layers with exactly two dimensions, as tensors or groups.
        others: all other parameters, as tensors or groups: embeddings, output head, norms, biases.
        lr: learning rate of groups without one.
        momentum: Muon's, a Nesterov momentum.
        betas: AdamW's.
        weight_decay: decoupled; of groups without one.

    Raises:
        ValueError: torch is older than 2.9, a matrix has not two dimensions, a parameter is in both
            lists, or a value is out of range.

    Example::

        def configure_optimizers(self):
            matrices = [p for p in self.blocks.parameters() if p.ndim == 2]
            taken = set(matrices)
            return MuonAdamW(matrices, [p for p in self.parameters() if p not in taken], lr=1e-3)
    """

    def __init__(
        self,
        matrices: Iterable[Any],
        others: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise ValueError(
                f"Muon needs torch 2.9 or newer, and this is torch {torch.__version__}. Update"
                " torch, or train with AdamW (`optimizer=adamw` in the recipes)."
            )
        muon = torch.optim.Muon(
            matrices,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        adamw = fuse_on_cuda(AdamW(others, lr=lr, betas=betas, weight_decay=weight_decay))
        super().__init__([*muon.param_groups, *adamw.param_groups], adamw.defaults)
        self._parts: tuple[Optimizer, Optimizer] = (muon, adamw)

    def __getstate__(self) -> dict[str, Any]:  # torch copies and pickles no other attributes
        return {**super().__getstate__(), "_parts": self._parts}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of Muon on the matrices and of AdamW on everything else."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
        for group in self.param_groups:
            groups["ns_steps" not in group].append(group)
        for part, own in zip(self._parts, groups, strict=True):
            # in every step, because `load_state_dict` replaces both
            part.param_groups, part.state = own, self.state
            part.step()
        return loss


def muon_cosine(
    module: nn.Module,
    total_steps: int,
    lr: NonNegativeFloat = 1e-3,
    adamw_lr: NonNegativeFloat | None = None,
    momentum: FractionBelowOne = 0.95,
    betas: tuple[FractionBelowOne, FractionBelowOne] = (0.9, 0.95),
    weight_decay: NonNegativeFloat = 0.1,
    warmup_steps: NonNegativeInt | None = None,
    final_lr_fraction: Fraction = 0.1,
) -> OptimizerLRSchedulerConfig:
    """Create `MuonAdamW` and its schedule, as returned by `configure_optimizers`.

    Args:
        module: whose trainable parameters to optimize, divided by `hidden_matrices`.
        total_steps: optimizer steps of the whole run.
        lr: maximum learning rate of Muon, reached after warm-up.
        adamw_lr: maximum learning rate of AdamW; None: the same.
        momentum: of Muon.
        betas: of AdamW.
        weight_decay: of matrices and embeddings only.
        warmup_steps: as for `warmup_cosine`.
        final_lr_fraction: as for `warmup_cosine`.

    Raises:
        ValueError: from `warmup_cosine` or `MuonAdamW`.
    """
    matrices = hidden_matrices(module)
    taken = set(matrices)
    others = decay_groups([p for p in module.parameters() if p not in taken], weight_decay)
    rate = {"lr": lr if adamw_lr is None else adamw_lr}
    optimizer = MuonAdamW(
        [{"params": matrices}],
        [{**group, **rate} for group in others],
        lr=lr,
        momentum=momentum,
        betas=(betas[0], betas[1]),
        weight_decay=weight_decay,
    )
    return warmup_cosine(optimizer, total_steps, warmup_steps, final_lr_fraction)
