"""What no fragment holds, and how it joins the exchange while a fit runs.

Parameters that are frozen when a fit begins stand in no fragment and send nothing. Two kinds of
them join later, each time as a fragment of their own behind those that are there:

- *Thawed* ones are trained from now on. They join before the step that trains them first, when all
  replicas still hold them alike. Their offset is the step of the next launch: they leave a cycle
  after it. The headers of that launch and of all later ones carry a hash of what has joined
  (`LateParameters.digest`): replicas that have not thawed the same find out before any of it
  travels.
- *Moved* ones are not trained, but hooks write to them (a teacher in BYOL, DINO, MoCo, a mean
  teacher) and they are no longer the same on all replicas. Whether there are any is told by a hash
  of all frozen parameters in the headers of fragment 0. Where it differs, the replicas compare the
  hashes of each of them, and average those that differ, at once and then in every cycle: in fp32,
  as buffers are. The mean of moving averages is the moving average of the mean, so a teacher is
  what it would be of the replicas' mean weights. What nobody moves costs no byte; it is read once
  a cycle, at about the speed of memory.

Buffers need no such thing: those of a checkpoint are averaged from the start, integers count, and
what is not saved is each rank's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_commfree.comm.background import Background
from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.digest import digest, mix_digests
from lightning_commfree.comm.handshake import check_agreement
from lightning_commfree.diloco.fragments import Fragment
from lightning_commfree.diloco.outer import REPLICA_TAG
from lightning_commfree.model.shards import own

TAG = "moved"
_DIGEST_BYTES = 5


class LateParameters:
    """The parameters that no fragment holds.

    Args:
        module: the model.
        fragments: those with which the fit begins.

    Attributes:
        outside: those parameters, by name.
        joined: what has joined, in words.
    """

    def __init__(self, module: nn.Module, fragments: Iterable[Fragment]) -> None:
        held = {name for fragment in fragments for name in fragment.parameters}
        self.outside: dict[str, Tensor] = {
            name: p for name, p in module.named_parameters() if name not in held
        }
        self.joined: dict[str, str] = {}

    def thawed(self) -> list[str]:
        """Return the names of those that are trained now."""
        return [name for name, p in self.outside.items() if p.requires_grad]

    def join(self, p: int, fragment: Fragment, offset: int) -> None:
        """Note that some of them are fragment `p` from now on."""
        for name in (*fragment.parameters, *fragment.buffers):
            del self.outside[name]
        self.joined[f"what has joined as fragment {p}"] = f"{fragment} with offset {offset}"

    def digest(self, values: bool) -> Tensor | int:
        """Return a hash of what has joined, and of the frozen `values` where they are asked for.

        Returns:
            Less than 2^40, int64; 0 where there is nothing. A tensor is not waited for.
        """
        text = repr(self.joined).encode() if self.joined else b""
        joined = int.from_bytes(hashlib.sha256(text).digest()[:_DIGEST_BYTES], "big") if text else 0

        digests_T = self._digests() if values else None
        if digests_T is None:
            return joined

        return (mix_digests(digests_T) & ((1 << 8 * _DIGEST_BYTES) - 1)) ^ joined

    def moved(self, channel: Channel, background: Background, replica: Channel | None) -> list[str]:
        """Return which frozen parameters are not the same on all replicas.

        Collective, at the landing that has shown a difference.

        Raises:
            ValueError: not the same parameters have joined on all replicas.
        """
        names, digests_T = list(self._frozen()), self._digests()
        fingerprint = {**self.joined, "parameters in no fragment": repr(names)}

        def compare() -> Tensor | None:
            check_agreement(channel, fingerprint)
            if digests_T is None:
                return None
            return channel.all_gather(digests_T.to(channel.device), TAG).wait()

        # by the thread: it may be in the middle of an exchange on this channel
        digests_MT = background.submit(compare, TAG).wait()
        if digests_MT is None:
            return []

        differ_T = (digests_MT != digests_MT[0]).any(dim=0)
        if replica is not None and replica.size > 1:
            differ_T = differ_T.float().to(replica.device)
            differ_T = replica.all_reduce(differ_T, REPLICA_TAG).wait() > 0

        return [name for name, differs in zip(names, differ_T.tolist(), strict=True) if differs]

    def _frozen(self) -> dict[str, Tensor]:
        return {
            name: own(p)
            for name, p in self.outside.items()
            if not (p.requires_grad or is_lazy(p) or p.is_meta)
            and p.is_floating_point()
            and p.layout == torch.strided
        }

    def _digests(self) -> Tensor | None:
        """Return the hashes of the frozen parameters: int64, shape (T,); None where T = 0."""
        found = [digest(tensor.contiguous()) for tensor in self._frozen().values()]
        return torch.stack([one.to(found[0].device) for one in found]) if found else None


def refuse_late(late: Sequence[str], replica_size: int) -> None:
    """Refuse parameters that are trained now and stand in no fragment.

    Args:
        late: their names.
        replica_size: ranks of a replica.

    Raises:
        RuntimeError: with advice.
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
