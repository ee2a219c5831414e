"""The `DistributedLion` optimizer (arXiv:2404.00438), which is plain Lion on a single worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.exchange import View
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.lion.settings import LionSettings
from lightning_commfree.lion.voting import Voting
from lightning_commfree.lion.worker import (
    LionParam,
    check_momenta,
    copy_state,
    fill_state,
    update_masters,
)
from lightning_commfree.model.shards import is_shard, local_tensor


class DistributedLion(Optimizer):
    """Lion optimizer. Under `DistributedLionStrategy`, workers vote with one bit per parameter.

    Each of n workers has its own gradient g_i and momentum m_i:

        c_i   <- b1 m_i + (1 - b1) g_i
        Delta <- sign(sum of sign(c_i)), or mean of sign(c_i)
        m_i   <- b2 m_i + (1 - b2) g_i
        x     <- x (1 - lr decay) - lr Delta

    where sign(0) = 0. Without the strategy, n is 1, which is plain Lion. The arithmetic is in fp32
    for any gradient dtype, and each operation rounds once. Parameters with fewer than 32 bits have
    an fp32 master copy: steps update the copy, and the parameter is its rounded value. In bf16
    without a master copy, most steps would be rounded away.

    To choose hyperparameters, start from those of AdamW (`docs/tuning.md` has measurements):

    - `lr`: 3 to 10 times smaller (arXiv:2302.06675, section 5), because every step moves each
      parameter by `lr`; 4 times smaller was best for small language models.
    - `weight_decay`: larger by the same factor, which keeps its product with `lr`.
    - `betas`: do not use AdamW's. The momentum averages over 1 / (1 - beta2) steps, which should
      be about 2% of the run: (0.8, 0.9) for 500 steps, (0.9, 0.95) for 1,000, (0.9, 0.99) for 5,000
      or more. The authors use (0.95, 0.98) for long, unstable runs of language models.
    - Clip gradients (`gradient_clip_val=1.0`): otherwise, a few large gradients in the first steps
      dominate the momentum, and therefore the signs, for a long time.

    Args:
        params: tensors or parameter groups, as for any optimizer; `lr`, `betas` and `weight_decay`
            of a group are read at every step.
        lr: learning rate, at least 0.
        betas: coefficients of the direction and the momentum, in [0, 1).
        weight_decay: decoupled decay (lambda), not part of the vote.
        ns_steps: 0 selects Lion. A value above 0 selects SignMuon (arXiv:2605.16311): matrices vote
            with the signs of Muon's direction, which is c_i after this many Newton-Schulz
            iterations (Muon uses 5). Put embeddings and the output head in a group with 0;
            parameters that do not have exactly two dimensions use Lion in any group. Not supported
            for sharded models.

    Attributes:
        voting: the `Voting` that takes this optimizer's steps. None before `join`, and after
            `leave` or `add_param_group`. Without other workers, `step` creates one.

    Raises:
        ValueError: a value is out of range.
        TypeError: a parameter is a complex or integer tensor.

    Example::

        def configure_optimizers(self):
            return DistributedLion(self.parameters(), lr=1e-4, weight_decay=1.0)
    """

    # Defaults are set on the class, because torch copies and unpickles an optimizer without our
    # attributes, and the copy must be plain Lion.
    voting: Voting | None = None
    # plain tensors that share the memory of sharded parameters (`DTensor`), by parameter
    _local: Mapping[nn.Parameter, nn.Parameter] = MappingProxyType({})
    _must_rejoin = False  # parameters were added that the other workers do not know about

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        ns_steps: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "ns_steps": ns_steps}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Validate and add a parameter group, and stop voting.

        If this optimizer voted with other workers, call `join` again before the next step.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_group(group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

        joined = self.voting is not None and self.voting.view.size > 1
        self.leave()
        self._must_rejoin = joined

    def join(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        view: View,
        settings: LionSettings,
        node: Channel | None = None,
        shard_peers: Channel | None = None,
    ) -> Voting:
        """Start voting with other workers, afresh at each call; return the `Voting`.

        Args:
            parameters: names and values of all of this optimizer's parameters, in the order in
                which forward uses them; the same on all workers.
            view: the workers, with a channel for CPU tensors.
            settings: settings for the vote; the same on all workers.
            node: channel between the ranks of this worker, if they have equal gradients.
            shard_peers: channel between the ranks of this worker, if each of them holds and votes
                on a different shard of the parameters.
        """
        own = {p for group in self.param_groups for p in group["params"]}
        assert {p for _, p in parameters} == own, "the parameters are this optimizer's"

        self.leave()
        self._local = {p: nn.Parameter(local_tensor(p)) for _, p in parameters if is_shard(p)}
        named = [(name, self._local.get(p, p)) for name, p in parameters]
        self.voting = Voting(named, self._members, view, settings, node, shard_peers)
        return self.voting

    @property
    def is_voted_on(self) -> bool:
        """Whether the current votes cover exactly this optimizer's parameters."""
        now = {self._local.get(p, p) for group in self.param_groups for p in group["params"]}
        return self.voting is not None and self.voting.parameters == now

    def leave(self) -> None:
        """Stop voting and return to plain Lion."""
        if self.voting is not None:
            self.voting.close()
            self.voting = None
        self._must_rejoin = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take an optimizer step, by vote if there are other workers, which is collective.

        Args:
            closure: computes the loss and gradients; called once, before the vote.

        Raises:
            RuntimeError: the vote was rejected (`Voting.run_step`), or the parameters have changed
                since `join`.
            TypeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        voting = self._voting_for_step()
        for parameter, local in self._local.items():
            local.grad = None if parameter.grad is None else local_tensor(parameter.grad)
        voting.run_step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state returned by `state_dict`, with its saved dtypes.

        Raises:
            ValueError: the state has no momentum buffers for these parameters; nothing is loaded.
        """
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        if len(saved) == len(own):  # else torch raises below
            check_momenta(state_dict["state"], dict(zip(saved, own, strict=True)))
        super().load_state_dict(state_dict)

        # torch has cast the state to the parameters' dtypes, which rounds momentum buffers and
        # master copies of bf16 parameters: copy the state again with its saved dtypes
        for index, parameter in zip(saved, own, strict=True):
            if index in state_dict["state"]:  # else it has never been stepped
                copy_state(self.state[parameter], state_dict["state"][index], parameter.device)

    @torch.no_grad()
    def follow_parameters(self) -> None:
        """Update the fp32 master copies of parameters that were modified since the last step."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        update_masters([self.state[p] for p in parameters], [*map(local_tensor, parameters)])

    def _voting_for_step(self) -> Voting:
        """Return the current `Voting`, a new one if alone; raise if it must join others again."""
        if self.voting is not None and not self.is_voted_on:
            # user code has modified `param_groups` directly
            if self.voting.view.size > 1:
                self._must_rejoin = True
            else:
                self.leave()

        if self._must_rejoin:
            raise RuntimeError(
                "The parameters of this `DistributedLion` changed after it joined other workers."
                " Make the same change on all workers and call `join` again on each of them, or"
                " call `leave` to continue as plain Lion."
            )

        if self.voting is None:  # a single worker sends nothing: plain Lion
            own = [p for group in self.param_groups for p in group["params"]]
            named = [(f"parameter {i}", p) for i, p in enumerate(own)]
            alone = View.of(Channel([0], 0, Ledger()))
            return self.join(named, alone, LionSettings(check_drift_every=0))
        return self.voting

    def _members(self, parameters: Sequence[nn.Parameter]) -> list[LionParam]:
        """Return parameters with their groups and states; create any state that is missing."""
        owners = {self._local.get(p, p): (p, g) for g in self.param_groups for p in g["params"]}
        members = []
        for local in parameters:
            p, group = owners[local]
            members.append(LionParam(local, fill_state(self.state[p], local.detach()), group))
        return members


def _check_group(group: dict[str, Any]) -> None:
    """Raise a `ValueError` or `TypeError` if a value in a parameter group is invalid."""
    lr, betas, decay = group["lr"], group["betas"], group["weight_decay"]

    if not float(lr) >= 0:
        raise ValueError(
            f"`lr={lr}` must be 0 or more. Every step changes each parameter by `lr`, so use a"
            " value 3 to 10 times smaller than for AdamW."
        )
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    if not pair or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"`betas={betas}` must be two numbers in [0, 1), such as (0.9, 0.99).")
    if not decay >= 0:
        raise ValueError(f"`weight_decay={decay}` must be 0 or more.")

    if not (isinstance(group["ns_steps"], int) and group["ns_steps"] >= 0):
        raise ValueError(
            f"`ns_steps={group['ns_steps']}` must be an integer: 0 for Lion, or the number of"
            " Newton-Schulz iterations (Muon uses 5)."
        )

    for parameter in group["params"]:
        if not parameter.is_floating_point():
            raise TypeError(
                "`DistributedLion` supports only real floating-point parameters, but got one of"
                f" dtype {parameter.dtype} and shape {list(parameter.shape)}. Use another optimizer"
                " and strategy, or store a complex parameter as two real ones."
            )
