"""The `DistributedLion` optimizer (arXiv:2404.00438); without other workers, plain Lion."""

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
    update_master,
)
from lightning_commfree.model.shards import is_shard, local_tensor


class DistributedLion(Optimizer):
    """Lion; under `DistributedLionStrategy` its workers exchange one bit per parameter.

    Each of n workers has its own gradient g_i and momentum m_i:

        c_i   <- b1 m_i + (1 - b1) g_i
        Delta <- sign(sum of sign(c_i)), or their mean
        m_i   <- b2 m_i + (1 - b2) g_i
        x     <- x (1 - lr decay) - lr Delta

    with sign(0) = 0. Without the strategy n is 1, which is plain Lion. The arithmetic is in fp32
    whatever the gradients' dtype, and each operation rounds once. For parameters of less than 32
    bits an fp32 master copy is kept: steps change it, and the parameter is its rounded value. At
    bf16's precision most steps would be lost.

    Choosing settings, starting from AdamW's:

    - `lr`: 3 to 10 times smaller (arXiv:2302.06675, section 5), because every step moves each
      parameter by `lr`; a quarter was best for small language models.
    - `weight_decay`: larger by the same factor, which keeps its product with `lr`.
    - `betas`: not AdamW's. beta2 remembers 1 / (1 - beta2) steps; 0.99 (100 steps) suits runs of
      5,000 steps or more. For shorter runs choose about 2 % of the run, and for beta1 half as many
      steps, at most 0.9: (0.9, 0.95) for 1,000 steps, (0.8, 0.9) for 500. Lion is then on par with
      AdamW; with (0.9, 0.99) its loss is 14 to 21 % higher. The authors use (0.95, 0.98) for long
      runs of language models that are unstable.
    - Clip gradients (`gradient_clip_val=1.0`): a few large ones in the first steps dominate the
      momentum, and so its signs, for a long time. Without clipping, a small GPT-2 ended 14 % behind
      AdamW with one seed out of three.

    Args:
        params: tensors or parameter groups, as for any optimizer; `lr`, `betas` and `weight_decay`
            of a group are read at every step.
        lr: learning rate, 0 or more.
        betas: coefficients of direction and momentum, in [0, 1).
        weight_decay: lambda, decoupled: not part of the vote.

    Attributes:
        voting: the current vote with other workers, or None. Ends with `leave` or a change of the
            parameters.

    Raises:
        ValueError: a value is out of range.
        TypeError: a parameter is complex or an integer tensor.

    Example::

        def configure_optimizers(self):
            return DistributedLion(self.parameters(), lr=1e-4, weight_decay=1.0)
    """

    # Class attributes: torch does not restore ours in a copied or unpickled optimizer, which is
    # then plain Lion.
    voting: Voting | None = None
    _views: Mapping[nn.Parameter, nn.Parameter] = MappingProxyType({})
    _join_again = False  # parameters were added that the other workers do not know of

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add and validate a parameter group; voting is suspended until `join` is called again."""
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
        """Vote with other workers from now on; called by `DistributedLionStrategy`.

        Args:
            parameters: all parameters of this optimizer, with names, in order of use in forward;
                the same on all workers, with the same values.
            view: the workers, with a channel for CPU tensors.
            settings: settings of the vote, the same on all workers.
            node: channel between the ranks of this worker if they have equal gradients.
            others: channel between the ranks of this worker if they hold different shards of its
                parameters; each rank votes on its shards.
        """
        own = {p for group in self.param_groups for p in group["params"]}
        assert {p for _, p in parameters} == own, "the parameters are this optimizer's"

        self.leave()
        # sharded parameters are `DTensor`s; the vote works on plain tensors that share their memory
        self._views = {p: nn.Parameter(local_tensor(p)) for _, p in parameters if is_shard(p)}
        named = [(name, self._views.get(p, p)) for name, p in parameters]
        self.voting = Voting(named, self._members, view, settings, node, others)
        return self.voting

    @property
    def is_voted_on(self) -> bool:
        """Whether the current votes cover exactly the current parameters."""
        now = {self._views.get(p, p) for group in self.param_groups for p in group["params"]}
        return self.voting is not None and self.voting.parameters == now

    def leave(self) -> None:
        """Stop voting and become plain Lion again."""
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
            RuntimeError: a gradient contains NaN or Inf, or other reasons; see `Voting.run_step`.
            TypeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        voting = self._vote()
        for parameter, view in self._views.items():
            view.grad = None if parameter.grad is None else local_tensor(parameter.grad)
        voting.run_step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned.

        torch casts a state to the parameter's dtype, which would round the momentum and master copy
        of a bf16 parameter; here they keep the dtypes that were saved.

        Raises:
            ValueError: the state has no momenta for these parameters; nothing has been loaded.
        """
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        if len(saved) == len(own):  # else torch raises below
            check_momenta(state_dict["state"], dict(zip(saved, own, strict=True)))
        super().load_state_dict(state_dict)

        for index, parameter in zip(saved, own, strict=True):
            if index in state_dict["state"]:  # else it has no state yet
                copy_state(self.state[parameter], state_dict["state"][index], parameter.device)

    @torch.no_grad()
    def follow_parameters(self) -> None:
        """Update master copies from parameters that were written to since the last step."""
        for group in self.param_groups:
            for p in group["params"]:
                update_master(self.state[p], local_tensor(p))

    def _vote(self) -> Voting:
        if self.voting is not None and not self.is_voted_on:
            # the user has written to `param_groups` or to the lists in it
            if self.voting.view.size > 1:
                self._join_again = True
            else:
                self.leave()

        if self._join_again:
            raise RuntimeError(
                "The parameters of `DistributedLion` changed after it joined other workers, which"
                " must change theirs too. Call `join` again on all workers, or `leave`."
            )

        if self.voting is None:  # a vote of one worker, which sends nothing, is plain Lion
            own = [p for group in self.param_groups for p in group["params"]]
            named = [(f"parameter {i}", p) for i, p in enumerate(own)]
            alone = View.of(Channel([0], 0, Ledger()))
            return self.join(named, alone, LionSettings(check_drift_every=0))
        return self.voting

    def _members(self, parameters: Sequence[nn.Parameter]) -> list[LionParam]:
        """Return parameters with their state (created if missing) and group."""
        members = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                view = self._views.get(parameter, parameter)
                members[view] = parameter, group
        found = [(view, *members[view]) for view in parameters]
        return [LionParam(v, fill_state(self.state[p], v.detach()), group) for v, p, group in found]


def _check(group: dict[str, Any]) -> None:
    lr, betas, decay = group["lr"], group["betas"], group["weight_decay"]

    if not float(lr) >= 0:
        raise ValueError(
            f"`lr={lr}` must be 0 or more: every step moves each parameter by it. Choose it 3 to 10"
            " times smaller than for AdamW."
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
                f"`DistributedLion` got a parameter of dtype {parameter.dtype} and shape"
                f" {list(parameter.shape)}, but can only vote on real floating-point parameters."
                " Train it with another optimizer and strategy, or split a complex one into real"
                " parts."
            )
