"""One rank's watch over the others: it waits for exchanges, asks, and names who is gone.

A rank may be in several channels: where rank 2 of one leaves because rank 3 of another is gone, the
others in the first would blame rank 2. The watch of a *wider* channel with all these ranks in it
knows better: who finds a rank gone asks there, and tells there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from typing_extensions import override

from lightning_commfree.comm.liveness.blame import (
    ADVICE,
    AGREED,
    Findings,
    blame,
    failed_exchange,
)
from lightning_commfree.comm.liveness.port import ANSWER_SECONDS, Listener
from lightning_commfree.comm.liveness.questions import ADDRESS_BYTES, Answers, PeerAddress, ask_all
from lightning_commfree.comm.liveness.unwatched import Unwatched, Work

TAG = "peers"
"""The ledger's tag for the exchange of addresses."""
_SLICE = timedelta(seconds=0.1)  # how soon a waiting rank notices what it was told


class _GivenUpError(RuntimeError):
    """An exchange is waited for no longer, by what was found out about the others."""


class PeerWatch(Unwatched):
    """Answers for this rank, asks the others, and names the ranks that a failure is due to.

    It starts a daemon thread: make it in the process that trains, and `close` it there.

    Args:
        rank: global rank of this process.
        timeout: how long `wait` waits. The peers are asked every `ANSWER_SECONDS`, the last time so
            early that the error comes within it.
        wider: of a channel with these ranks and others.
    """

    def __init__(self, rank: int, timeout: timedelta, wider: Unwatched | None = None) -> None:
        super().__init__(seconds=timeout.total_seconds())
        self._rank = rank
        self._wider = wider or Unwatched()
        self._patience = min(ANSWER_SECONDS, self.seconds / 2)
        self._launched = 0
        self._peers: dict[int, PeerAddress | None] = {}
        self._about_this_rank: Callable[[], Mapping[str, Any]] = dict
        self._found = Findings()
        self._closed = False
        self._listener = Listener(self._answer)

    @property
    def address(self) -> bytes:
        """Where this rank answers: `ADDRESS_BYTES` bytes, zeros where nobody can ask it."""
        address = self._listener.address
        return bytes(ADDRESS_BYTES) if address is None else address.encode()

    def meet(self, addresses: Mapping[int, bytes]) -> None:
        """Learn the addresses of all ranks of the channel, by global rank."""
        self._peers = {r: PeerAddress.decode(a) for r, a in addresses.items() if r != self._rank}

    @property
    @override
    def can_ask(self) -> bool:
        return self._listener.runs and None not in self._peers.values()

    @override
    @contextmanager
    def launching(self, tag: str) -> Iterator[None]:
        """Count an exchange that the body launches; name the lost ranks if that fails.

        Raises:
            RuntimeError: the launch failed, or a peer has told that the group is broken.
        """
        self._launched += 1
        with self.naming(tag):
            yield

    @override
    @contextmanager
    def naming(self, tag: str, computing: bool = False) -> Iterator[None]:
        """Name the lost ranks if the body fails, which lets these ranks exchange something.

        Args:
            tag: what is exchanged.
            computing: the body may fail by itself as well. Its error passes as it is where no rank
                is found gone, nor, after the timeout, silent.

        Raises:
            RuntimeError: the body raised one, or a peer has told that the group is broken.
        """
        start = time.monotonic()
        if self._found.lost:
            raise self._failure(tag, 0.0, "a rank had been lost before")
        try:
            yield
        except RuntimeError as error:
            waited, answers = time.monotonic() - start, None
            if computing:
                # an exchange in the body has named them, or nobody need be: all end by this error
                if ADVICE in str(error) or AGREED in str(error):
                    raise
                answers = self._ask()
                gone = answers.lost if waited >= self.seconds else answers.gone
                if not gone and not self._found.lost:
                    raise
            raise self._failure(tag, waited, str(error), answers) from error

    @override
    def wait(self, works: Sequence[Work], tag: str) -> None:
        """Block until all `works`, the parts of one exchange, are done.

        Raises:
            RuntimeError: one failed, the timeout ran out, or a peer told that a rank is lost. The
                message names the ranks.
        """
        start = time.monotonic()
        answers = None
        last_s = self.seconds - self._patience
        next_s = min(ANSWER_SECONDS, last_s)
        try:
            while not all(map(_has_ended, works)):
                waited = time.monotonic() - start
                if self._found.lost:
                    raise _GivenUpError("another rank found out")
                if self._closed:
                    raise _GivenUpError("the channel was closed on this rank")
                if waited >= self.seconds:
                    raise _GivenUpError("timed out")
                if waited >= next_s:
                    answers = self._ask()
                    next_s = min(next_s + ANSWER_SECONDS, last_s) if next_s < last_s else math.inf
                    if any(self._found.left_at(rank) < self._launched for rank in answers.gone):
                        raise _GivenUpError("a rank is gone that it waits for")
        except RuntimeError as error:
            if (
                self._closed and not self._found.lost
            ):  # while a thread waited here: nobody is to blame
                raise
            waited = time.monotonic() - start
            # where an exchange broke, who answered before that may be gone now; at the end of the
            # timeout there is no time to ask again
            fresh = isinstance(error, _GivenUpError) or waited >= last_s
            raise self._failure(tag, waited, str(error), answers if fresh else None) from error

    @override
    def close(self) -> None:
        """Take leave of the peers and stop answering.

        1. The last exchange of a job ends on rank 0 and is still on a slow link to rank 1.
        2. Rank 0 closes. Rank 1, which asks in vain, must not take it for dead.

        A thread of this rank that is still in `wait` gets an error at once, and blames nobody.
        """
        self._closed = True
        if self._listener.runs and not self._found.lost:
            self._ask({"left": {"rank": self._rank, **self._words()}})
        self._listener.close()

    @override
    def find_gone(self) -> dict[int, str]:
        if not self._found.lost:
            answers = self._ask()
            if answers.gone:
                self._found.learn(answers.gone)
                self._spread(answers)
        return self._found.lost

    @override
    def tell(self, words: Callable[[], Mapping[str, Any]]) -> None:
        self._about_this_rank = words

    @override
    def told(self, tag: str) -> dict[int, dict[str, Any]] | None:
        """Ask every other rank what it tells about itself.

        Returns:
            By rank; of one that does not answer now, {}; of one that has closed its channel, its
            last words and "closed". None where a rank has no address, so on all ranks alike.

        Raises:
            RuntimeError: a rank is gone; `tag` is what the error calls the question.
        """
        if not self.can_ask:
            return None
        answers = self._ask()
        if self._found.lost or any(rank not in self._found.left for rank in answers.gone):
            raise self._failure(tag, 0.0, "asked where it is", answers)
        gone = {rank: {**self._found.left[rank], "closed": True} for rank in answers.gone}
        return answers.told | gone | {rank: {} for rank in answers.silent}

    # -- asking

    def _failure(
        self, tag: str, waited: float, cause: str, answers: Answers | None = None
    ) -> RuntimeError:
        if not self._found.lost:
            answers = answers or self._ask()
            lost = self._wider.find_gone() if answers.gone else {}
            self._found.learn(lost or blame(answers, self._rank, self._launched, tag, waited))
            self._spread(answers)
        return failed_exchange(tag, self._rank, waited, cause, self._found.lost)

    def _spread(self, answers: Answers) -> None:
        """Tell who answered of the lost ranks, before this rank can leave.

        Who knows better keeps what it knows.
        """
        self._ask({"lost": self._found.lost}, skip=answers.gone.keys() | answers.silent.keys())

    def _ask(
        self, question: Mapping[str, Any] | None = None, skip: Collection[int] = ()
    ) -> Answers:
        peers = {r: a for r, a in self._peers.items() if a is not None and r not in skip}
        return ask_all(peers, question or {}, self._patience)

    # -- answering, in the listener's thread

    def _answer(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        self._found.hear(question, self._rank, self._peers)
        return self._words()

    def _words(self) -> dict[str, Any]:
        return {**self._about_this_rank(), "launched": self._launched}


def _has_ended(work: Work) -> bool:
    """Wait for a slice of time; return whether `work` has ended, raise what it failed with."""
    try:
        work.wait(_SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait(_SLICE)  # it may have ended well just after the slice
    return True
