"""What `ExactResume` and a strategy's algorithm ask of each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

from lightning_commfree.resume.rank_files import SavedParts

T = TypeVar("T")
Part = dict[str, Any]  # of one rank, by the names in `exact`

REPLICA = ("algorithm", "optimizers", "precision", "tensors")  # entries of a replica's own
PLACE = ("random", "epoch_start", "loaders", "ahead", "lost")  # and of where its data stand


class Agreeing(Protocol):
    """What ranks tell each other while they save and resume; all methods are collective."""

    @property
    def rank(self) -> int:
        """This one's."""

    @property
    def size(self) -> int:
        """How many they are."""

    def broadcast(self, value: T, src: int = 0) -> T:
        """Return the value of rank `src`."""

    def all_flags(self, mine: bool) -> list[bool]:
        """Return the flags of all ranks, by rank."""


@contextmanager
def failing_as_one(ranks: Agreeing) -> Iterator[None]:
    """If the body fails on some rank, let all ranks raise: their own error, or that one's."""
    failure = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - it is raised below
        failure = error
    failed = ranks.all_flags(failure is not None)
    if any(failed):
        text = ranks.broadcast(str(failure), failed.index(True))
        raise failure or RuntimeError(text)


class Adopted(NamedTuple):
    """What a rank goes on with where an exact resume is not possible."""

    part: Part  # some entries of a part; what is not there begins anew
    said: str  # what is kept, behind "Every rank starts from the checkpoint's weights, "


class ReplicaState(Protocol):
    """What holds a replica's model, which several ranks may do together."""

    def writing(self) -> AbstractContextManager[None]:
        """In the body rank 0 writes a checkpoint, of which its replica's ranks may hold parts."""

    def state_dict(self) -> dict[str, Any]:
        """Return it: tensors and plain values, which need not be copies."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""


class RankState(Protocol):
    """What a strategy's algorithm knows on this rank; it answers from `begin` to `end`.

    Attributes:
        name: of the algorithm; another one has no use for its parts.
        replicas: ranks hold models of their own, with optimizers and further tensors of their own.
            Else they hold parts of one, which a checkpoint puts together.
        free_at_resume: names in `fingerprint` that may have other values at a resume.
    """

    name: str
    replicas: bool
    free_at_resume: frozenset[str]

    def fingerprint(self) -> dict[str, str]:
        """Return the settings that must be as they were for an exact resume."""

    def state_dict(self) -> dict[str, Any]:
        """Return the algorithm's state on this rank: plain values, and tensors, not copies."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned; the algorithm stands at its beginning."""

    def adopt(self, saved: Saved) -> Adopted | None:
        """Choose what this rank can use of a save by other ranks or with other settings.

        Collective over the world: all ranks return something, or all return None.

        Args:
            saved: by the same algorithm; files of some ranks may be gone.
        """


class Saved:
    """The parts of a checkpoint, for all ranks together.

    Attributes:
        entry: what the checkpoint says of its ranks; empty where it says nothing.
    """

    def __init__(self, parts: SavedParts, ranks: Agreeing) -> None:
        self.entry = parts.entry
        self._parts, self._ranks = parts, ranks

    def load(self, wanted: Iterable[int]) -> list[Part | None]:
        """Return the parts of some ranks, None for one that is gone.

        Collective, and so is its error.

        Raises:
            RuntimeError: what is there is another rank's, of another save, or damaged.
        """
        with failing_as_one(self._ranks):
            return [self._parts.load(rank) for rank in wanted]

    def load_all(self, wanted: Iterable[int]) -> list[Part]:
        """Return the parts of some ranks, or none if some rank does not find all that it wants."""
        found = self.load(wanted)
        complete = all(self._ranks.all_flags(None not in found))
        return [part for part in found if part is not None and complete]

    def adopted_by(self, owner: RankState) -> Adopted:
        """Return what a rank goes on with that does not go on exactly; collective."""
        same = self.entry.get("algorithm") == owner.name
        adopted = owner.adopt(self) if same else None
        if adopted is not None:
            return adopted
        state = "the optimizer state of rank 0" if owner.replicas else "its optimizer state"
        return Adopted(
            {},
            f"with {state} where it stands in the checkpoint. What else only single ranks know"
            " begins anew: the epoch's data, random numbers and the strategy's own",
        )

    def why_not_exact(self, owner: RankState, found: bool, ranks: int) -> str:
        """Return why the ranks do not go on with their own parts; empty if they do.

        Collective.

        Args:
            owner: of the fit.
            found: this rank has its part.
            ranks: of the fit.
        """
        if not self.entry:
            return (
                "it holds no state of single ranks, as another strategy saves it or as it is saved"
                " outside of a fit"
            )
        if self.entry["algorithm"] != owner.name:
            return f"it was saved by {self.entry['algorithm']}, and this is {owner.name}"

        now, was = owner.fingerprint(), self.entry["fingerprint"]
        changed = [
            f"{name} was {was.get(name, 'absent')} and is {now.get(name, 'absent')}"
            for name in sorted((now.keys() | was.keys()) - owner.free_at_resume)
            if now.get(name) != was.get(name)
        ]
        if self.entry["ranks"] != ranks:
            changed.insert(0, f"it was saved by {self.entry['ranks']} ranks, these are {ranks}")
        if changed:
            return "; ".join(changed)

        flags = self._ranks.all_flags(found)
        missing = ", ".join(str(rank) for rank, has in enumerate(flags) if not has)
        place = self.entry["place"]
        return f"the files of rank {missing} below {place!r} are gone" if missing else ""
