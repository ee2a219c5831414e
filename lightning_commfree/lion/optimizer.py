"""Lion with workers that vote (arXiv:2404.00438); alone it is plain Lion (arXiv:2302.06675)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.comm.view import View
from lightning_commfree.lion.settings import LionSettings
from lightning_commfree.lion.voting import Voting
from lightning_commfree.lion.worker import (
    Member,
    check_momenta,
    fill_state,
    follow_values,
    keep_exact,
)
from lightning_commfree.model.shards import is_part
from lightning_commfree.model.shards import own as own_part


class DistributedLion(Optimizer):
    """Lion; under `DistributedLionStrategy` its workers exchange one bit per parameter.

    Worker i of n has its own gradient and its own momentum:

        c_i   <- b1 m_i + (1 - b1) g_i
        Delta <- sign(sum of sign(c_i)), or their mean
        m_i   <- b2 m_i + (1 - b2) g_i
        x     <- x (1 - lr decay) - lr Delta

    with sign(0) = 0. Without the strategy n is 1, which is plain Lion. The arithmetic is in fp32
    whatever the gradients are, and each operation rounds once. For parameters of less than 32 bits
    an fp32 master copy is kept: steps change it, and the parameter is its rounded value. At bf16's
    precision most steps would be lost.

    How to choose, from AdamW's settings:

    - `lr`: 3 to 10 times smaller (arXiv:2302.06675, section 5), for every step moves a parameter by
      it; a quarter was best for small language models.
    - `weight_decay`: as many times larger, which keeps the product with `lr`.
    - `betas`: not AdamW's. beta2 remembers 1 / (1 - beta2) steps, and 0.99 (100 steps) is for runs
      of 5,000 steps and more. In shorter ones take about 2 % of the run, and half as many steps in
      beta1, at most 0.9: (0.9, 0.95) for 1,000 steps, (0.8, 0.9) for 500. There Lion is level with
      AdamW, and with (0.9, 0.99) 14 to 21 % behind it in loss. The authors' (0.95, 0.98) is for
      long runs of language models that are not steady.
    - Clip gradients (`gradient_clip_val=1.0`): a few large ones of the first steps fill the
      momentum, and their signs stay. Without, a small GPT-2 ended 14 % behind AdamW with one seed
      of three.

    Args:
        params: tensors, or groups of them as for any optimizer; `lr`, `betas` and `weight_decay`
            of a group are read at every step.
        lr: learning rate, 0 or more.
        betas: of direction and momentum, in [0, 1).
        weight_decay: lambda, decoupled: not part of the vote.

    Attributes:
        voting: what `join` returned, until `leave` or a change of the parameters; None without it.

    Raises:
        ValueError: a value outside its range.
        TypeError: a parameter that is complex or holds whole numbers.

    Example::

        def configure_optimizers(self):
            return DistributedLion(self.parameters(), lr=1e-4, weight_decay=1.0)
    """

    # attributes of the class: torch restores only its own state in a copy or an unpickled
    # optimizer, which then is plain Lion
    voting: Voting | None = None
    _views: Mapping[nn.Parameter, nn.Parameter] = MappingProxyType({})
    _join_again = False  # the other workers do not know of parameters that were added

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own; checks them."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check(group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

        joined = self.voting is not None and self.voting.view.size > 1
        self.leave()
        self._join_again = joined

    def join(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        view: View,
        settings: LionSettings,
        node: Channel | None = None,
        others: Channel | None = None,
    ) -> Voting:
        """Vote with other workers from now on; `DistributedLionStrategy` calls it.

        Args:
            parameters: all of this optimizer's, with names, in order of use in forward; the same
                on all workers, and with the same values.
            view: the workers; their channel carries CPU tensors.
            settings: of the vote, the same on all workers.
            node: channel between the ranks that form one worker; their gradients are equal.
            others: channel between the ranks that form one worker and hold the other shards of its
                parameters; each votes on its own.
        """
        own = {p for group in self.param_groups for p in group["params"]}
        assert {p for _, p in parameters} == own, "the parameters are this optimizer's"

        self.leave()
        self._views = {p: nn.Parameter(own_part(p)) for _, p in parameters if is_part(p)}
        named = [(name, self._views.get(p, p)) for name, p in parameters]
        self.voting = Voting(named, self._members, view, settings, node, others)
        return self.voting

    @property
    def is_voted_on(self) -> bool:
        """Whether exactly its current parameters are voted on."""
        now = {self._views.get(p, p) for group in self.param_groups for p in group["params"]}
        return self.voting is not None and self.voting.parameters == now

    def leave(self) -> None:
        """Stop voting: it is plain Lion again."""
        if self.voting is not None:
            self.voting.close()
            self.voting = None
        self._join_again = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, together with the other workers if there are any.

        Args:
            closure: computes loss and gradients; called once, before the vote.

        Raises:
            RuntimeError: see `Voting.run_step`. A gradient with NaN or Inf, among others.
            TypeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        voting = self._vote()
        for parameter, view in self._views.items():
            view.grad = None if parameter.grad is None else own_part(parameter.grad)
        voting.run_step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        torch casts state to the parameter's dtype, which would round momentum and master copy of a
        bf16 parameter: they are taken over as they were saved.

        Raises:
            ValueError: it does not hold momenta of these parameters; nothing has been loaded.
        """
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        if len(saved) == len(own):  # else torch says so
            check_momenta(state_dict["state"], dict(zip(saved, own, strict=True)))
        super().load_state_dict(state_dict)

        for index, parameter in zip(saved, own, strict=True):
            if index in state_dict["state"]:  # else it stays without state
                keep_exact(self.state[parameter], state_dict["state"][index], parameter.device)

    @torch.no_grad()
    def follow_parameters(self) -> None:
        """Update master copies from weights that were written after the state was made."""
        for group in self.param_groups:
            for p in group["params"]:
                follow_values(self.state[p], own_part(p))

    def _vote(self) -> Voting:
        if self.voting is not None and not self.is_voted_on:
            # somebody has written to `param_groups`, or to the lists in them
            if self.voting.view.size > 1:
                self._join_again = True
            else:
                self.leave()

        if self._join_again:
            raise RuntimeError(
                "The parameters of `DistributedLion` changed after it had joined other workers, who"
                " must change theirs too. Call `join` again on all of them, or `leave`."
            )

        if self.voting is None:
            own = [p for group in self.param_groups for p in group["params"]]
            named = [(f"parameter {i}", p) for i, p in enumerate(own)]
            alone = View.of(Channel([0], 0, Ledger()))
            return self.join(named, alone, LionSettings(check_drift_every=0))
        return self.voting

    def _members(self, parameters: Sequence[nn.Parameter]) -> list[Member]:
        """Return parameters with their state, created at the first call, and their group."""
        members = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                view = self._views.get(parameter, parameter)
                members[view] = parameter, group
        found = [(view, *members[view]) for view in parameters]
        return [Member(v, fill_state(self.state[p], v.detach()), group) for v, p, group in found]


def _check(group: dict[str, Any]) -> None:
    lr, betas, decay = group["lr"], group["betas"], group["weight_decay"]

    if not float(lr) >= 0:
        raise ValueError(
            f"`lr={lr}` must be 0 or more: it is what every step moves a parameter by. Lion likes 3"
            " to 10 times less than AdamW."
        )
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    if not pair or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(
            f"`betas={betas}` must be two numbers of at least 0 and below 1, like (0.9, 0.99)."
        )
    if not decay >= 0:
        raise ValueError(f"`weight_decay={decay}` must be 0 or more.")

    for parameter in group["params"]:
        if not parameter.is_floating_point():
            raise TypeError(
                f"`DistributedLion` got a parameter of {parameter.dtype} and shape"
                f" {list(parameter.shape)}: only real floating-point ones have a sign to vote on."
                " Train it with another optimizer and strategy, or split it into real parts."
            )
