"""Parameters that are not trained when a fit begins and therefore belong to no fragment.

They are frozen, or no optimizer holds them (`model.trained`). Two things can happen to them during
the fit:

- The user unfreezes them, or adds them to an optimizer. They become a new fragment before the first
  step that trains them, while all replicas still have the same values. This fragment's offset in
  the schedule is the next step at which any fragment launches, and its own first launch is one
  cycle later. The headers of all later launches contain a hash of the fragments that were added
  during the fit. If replicas have unfrozen different parameters, they stop before sending any of
  these parameters.
- Hooks *move* them: the teacher in BYOL, DINO, MoCo or Mean Teacher, or an `AveragedModel`, is a
  moving average of the local weights, so it differs between replicas. When validation begins and
  when the fit ends, replicas compare hashes and average the parameters that differ. The mean of
  moving averages is the moving average of the means, so the result is the teacher of the averaged
  student. Between these averages, each replica learns from its own teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_commfree.comm.background import Background
from lightning_commfree.comm.digest import digest
from lightning_commfree.comm.exchange import View, ordered_sum
from lightning_commfree.comm.handshake import check_agreement
from lightning_commfree.diloco.fragments import Fragment
from lightning_commfree.model.shards import local_tensor
from lightning_commfree.model.trained import trained_parameters

TAG = "moved"


class FrozenParameters:
    """Parameters in no fragment, because they were not trained when the fit began."""

    def __init__(
        self,
        module: nn.Module,
        fragments: Iterable[Fragment],
        optimizers: Callable[[], Iterable[Optimizer]],  # those of now, for `trained_parameters`
    ) -> None:
        held = {name for fragment in fragments for name in fragment.parameters}
        self._module, self._optimizers = module, optimizers
        self._parameters: dict[str, Tensor] = {
            name: p for name, p in module.named_parameters() if name not in held
        }

    def unfrozen(self) -> list[str]:
        """Return the names of the parameters that started being trained during the fit."""
        if not any(p.requires_grad for p in self._parameters.values()):
            return []  # called at every step
        trained = trained_parameters(self._module, self._optimizers())
        return [name for name in self._parameters if name in trained]

    def remove(self, names: Iterable[str]) -> None:
        """Stop tracking parameters that have become part of a fragment."""
        for name in names:
            del self._parameters[name]

    def digests(self) -> list[int]:
        """Return one hash per frozen parameter, computed from this rank's tensor or shard."""
        return [int(digest(tensor.contiguous())) for tensor in self._tensors().values()]

    def average_moved(
        self, view: View, background: Background, fingerprint: Mapping[str, str]
    ) -> None:
        """Average the frozen parameters that differ across replicas, in place; collective.

        Each rank averages its own tensors or shards with the same rank in the other replicas.
        Raise a `ValueError` if the fingerprints or the shapes differ: the hashes would then belong
        to different parameters.
        """
        tensors, channel = self._tensors(), view.channel
        if view.size == 1 or not tensors:
            return

        def average() -> list[tuple[Tensor, Tensor]]:
            shapes = {f"shape of {name}": str(list(t.shape)) for name, t in tensors.items()}
            check_agreement(channel, {**fingerprint, **shapes})
            found = [digest(tensor.contiguous()).to(channel.device) for tensor in tensors.values()]
            hashes_MT = channel.all_gather(torch.stack(found), TAG).wait()
            differ_T = (hashes_MT != hashes_MT[0]).any(dim=0).tolist()
            pairs = zip(tensors.values(), differ_T, strict=True)
            moved = [tensor for tensor, differs in pairs if differs]
            rows = [channel.all_gather(t.float().to(channel.device), TAG).wait() for t in moved]
            return [(tensor, _finite_mean(row)) for tensor, row in zip(moved, rows, strict=True)]

        # in the background: an exchange on the same channel may be running there, and collectives
        # must keep their order
        for tensor, mean in background.submit(average, TAG).wait():
            tensor.copy_(mean)

    def _tensors(self) -> dict[str, Tensor]:
        """Return this rank's tensors or shards of the parameters that can be averaged, by name."""
        trained = self.unfrozen()
        return {
            name: local_tensor(p)
            for name, p in self._parameters.items()
            if not (name in trained or is_lazy(p) or p.is_meta)
            and p.is_floating_point()
            and p.layout == torch.strided
        }


def _finite_mean(rows_M: Tensor) -> Tensor:
    """Average the rows that contain only finite values, or all rows if there are none."""
    finite = [row for row in rows_M if bool(row.isfinite().all())] or list(rows_M)
    return ordered_sum(finite) / len(finite)
