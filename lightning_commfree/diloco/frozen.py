"""Parameters that are frozen when a fit begins: they are in no fragment and are never sent.

Two things can happen to them during the fit:

- They are *thawed* and trained from now on. They become one more fragment before the step that
  trains them first, while all replicas still hold the same values. Its offset in the schedule is
  the step of the next launch, and it leaves a cycle after that. The headers of that next launch
  carry a hash of what has joined: replicas that thawed different parameters find out before any of
  them travels.
- Hooks *move* them: a teacher in BYOL, DINO, MoCo or a mean teacher follows the local weights, and
  is different on each replica. Moved parameters are averaged when a validation begins and at the
  end of the fit; the replicas compare hashes to find them. The mean of moving averages is the
  moving average of the mean, so the teacher is then what the mean of the students would have had.
  In between each replica learns from its own teacher.

Buffers need neither: those in a checkpoint are averaged with their fragment, integers count, and
buffers that are not saved belong to each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_commfree.comm.background import Background
from lightning_commfree.comm.digest import digest
from lightning_commfree.comm.handshake import check_agreement
from lightning_commfree.comm.view import View
from lightning_commfree.diloco.fragments import Fragment
from lightning_commfree.model.shards import own

TAG = "moved"


class FrozenParameters:
    """The parameters that are in no fragment.

    Args:
        module: the model.
        fragments: those of the fit.
    """

    def __init__(self, module: nn.Module, fragments: Iterable[Fragment]) -> None:
        held = {name for fragment in fragments for name in fragment.parameters}
        self._parameters: dict[str, Tensor] = {
            name: p for name, p in module.named_parameters() if name not in held
        }

    def thawed(self) -> list[str]:
        """Return the names of those that are trained now."""
        return [name for name, p in self._parameters.items() if p.requires_grad]

    def remove(self, names: Iterable[str]) -> None:
        """Forget parameters that have joined as a fragment."""
        for name in names:
            del self._parameters[name]

    def average_moved(
        self, view: View, background: Background, fingerprint: Mapping[str, str]
    ) -> None:
        """Average those that are different on the replicas; collective.

        A replica that holds NaN or Inf does not count.

        Args:
            view: the replicas. Each rank averages its own tensors, or shards, with its peers.
            background: its thread may be using the channel, so this runs in its turn.
            fingerprint: must be equal on all replicas, else the tensors could not be compared.

        Raises:
            ValueError: it is not.
        """
        tensors, channel = self._tensors(), view.channel
        if view.size == 1 or not tensors:
            return

        def average() -> list[tuple[Tensor, Tensor]]:
            check_agreement(channel, {**fingerprint, "frozen parameters": repr(list(tensors))})
            found = [digest(tensor.contiguous()).to(channel.device) for tensor in tensors.values()]
            hashes_MT = channel.all_gather(torch.stack(found), TAG).wait()
            differ_T = (hashes_MT != hashes_MT[0]).any(dim=0).tolist()
            pairs = zip(tensors.values(), differ_T, strict=True)
            moved = [tensor for tensor, differs in pairs if differs]
            rows = [channel.all_gather(t.float().to(channel.device), TAG).wait() for t in moved]
            return [(tensor, _finite_mean(row)) for tensor, row in zip(moved, rows, strict=True)]

        for tensor, mean in background.submit(average, TAG).wait():
            tensor.copy_(mean)

    def _tensors(self) -> dict[str, Tensor]:
        """Return those that can be compared, as this rank holds them."""
        return {
            name: own(p)
            for name, p in self._parameters.items()
            if not (p.requires_grad or is_lazy(p) or p.is_meta)
            and p.is_floating_point()
            and p.layout == torch.strided
        }


def _finite_mean(rows_M: Tensor) -> Tensor:
    """Return the mean of the rows that are finite; of all where none is."""
    finite = [row for row in rows_M if bool(row.isfinite().all())] or list(rows_M)
    total: Tensor = finite[0].clone()
    for row in finite[1:]:  # in the order of the replicas: the same bits on all of them
        total += row
    return total / len(finite)


def refuse_late(late: Sequence[str], replica_size: int) -> None:
    """Refuse parameters that became trainable where they cannot join.

    Args:
        late: their names.
        replica_size: ranks of a replica.

    Raises:
        RuntimeError: always.
    """
    why, advice = (
        (
            f"with `replica_size={replica_size}` their gradients are not averaged in a replica",
            "or end the fit and begin another one",
        )
        if replica_size > 1
        else (
            "belong to no fragment: every replica would train its own",
            "or between two steps, as `BackboneFinetuning` does when an epoch begins: in the"
            " middle of one it is not seen in time",
        )
    )
    raise RuntimeError(
        f"The parameters {sorted(late)} became trainable after the fit had begun and {why}. Make"
        f" them trainable before `fit`, {advice}."
    )
