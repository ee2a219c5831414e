"""Who is gone? A second line between the ranks of a channel, used when an exchange fails.

A collective that fails does not say on whose account. Some ranks hear "connection closed by peer"
at once, others wait, and whoever hears it first leaves and is then blamed by the rest. So:

1. Rank 1 is killed. The exchange fails on rank 0, which talks to it; ranks 2 and 3 still wait.
2. Rank 0 asks everybody. Rank 1 refuses, ranks 2 and 3 answer. Rank 0 tells them that rank 1 is
   gone, and only then raises.
3. Ranks 2 and 3 were told, so they raise at once and name rank 1, though rank 0 has left as well.

A rank may be in several channels: where rank 2 of one leaves because rank 3 of another is gone, the
others in the first would blame rank 2. The watch of a *wider* channel with all these ranks in it
knows better: who finds a rank gone asks there, and tells there.

gloo overlooks a death now and then, so a rank that waits for long asks too. A rank that hangs still
accepts connections (its kernel does), therefore an *answer* is asked for:

======== ================= =====================================================================
question `lost` (optional) reason by rank: what the asking rank has found out
question `left` (optional) the rank that closes its channel, and what it has launched until then
answer   `launched`        exchanges that the rank has launched on this channel
answer   others            what the rank tells about itself (`tell`)
======== ================= =====================================================================

While training goes well and an exchange takes less than `ANSWER_SECONDS`, nothing travels here but
a word of leave at the end.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

from typing_extensions import override

from lightning_commfree.comm.answering import (
    ADDRESS_BYTES,
    ANSWER_SECONDS,
    Answers,
    Listener,
    PeerAddress,
    Silence,
    ask,
)
from lightning_commfree.comm.works import Work, has_ended

TAG = "peers"
_NAMED = 50  # lost ranks in a message, which has to fit into a line
_REASON_CHARACTERS = 250
_ADVICE = "Restart all ranks from the last checkpoint."


class _GivenUpError(RuntimeError):
    """An exchange is waited for no longer, by what was found out about the others."""


class Unwatched:
    """In place of a watch where nobody is asked: a single rank, or liveness is switched off.

    Errors of exchanges pass as they are.

    Args:
        size: ranks of the channel.
        seconds: the timeout of its exchanges.
    """

    def __init__(self, size: int = 1, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self._size = size

    @property
    def can_ask(self) -> bool:
        """Whether this rank finds out about the others; the same on all ranks."""
        return self._size == 1

    def launching(self, tag: str) -> AbstractContextManager[None]:
        """In the body an exchange is launched."""
        return nullcontext()

    def naming(self, tag: str, computing: bool = False) -> AbstractContextManager[None]:
        """In the body these ranks exchange something."""
        return nullcontext()

    def wait(self, works: Sequence[Work], tag: str) -> None:
        """Block until all `works`, the parts of one exchange, are done.

        Raises:
            RuntimeError: one failed, or the timeout ran out.
        """
        for work in works:
            work.wait()

    def find_gone(self) -> dict[int, str]:
        """Return the ranks that are known to be gone, with reasons."""
        return {}

    def tell(self, **told: Any) -> None:
        """Say something about this rank to whoever asks: to nobody."""

    def told(self, tag: str) -> dict[int, dict[str, Any]] | None:
        """Return what every other rank tells about itself; None where none can be asked."""
        return {} if self.can_ask else None

    def close(self) -> None:
        """Take leave."""


class PeerWatch(Unwatched):
    """Answers for this rank, asks the others, and names the ranks that a failure is due to.

    It starts a daemon thread: make it in the process that trains, and `close` it there.

    Args:
        rank: global rank of this process.
        timeout: how long `wait` waits. The peers are asked every `ANSWER_SECONDS`, the last time so
            early that the error comes within it.
        wider: of a channel with these ranks and others.

    Attributes:
        seconds: the timeout.
    """

    def __init__(self, rank: int, timeout: timedelta, wider: Unwatched | None = None) -> None:
        super().__init__(seconds=timeout.total_seconds())
        self._rank = rank
        self._wider = wider or Unwatched()
        self._patience = min(ANSWER_SECONDS, self.seconds / 2)
        self._launched = 0
        self._peers: dict[int, PeerAddress | None] = {}
        self._told: dict[str, Any] = {}
        self._left: dict[int, dict[str, Any]] = {}  # by rank that closed its channel: what it said
        self._lost: dict[int, str] = {}  # the first finding, ours or a peer's; never replaced
        self._lock = threading.Lock()
        self._closed = False
        self._listener = Listener(self._answer)

    @property
    def address(self) -> bytes:
        """Where this rank answers: `ADDRESS_BYTES` bytes, zeros where nobody can ask it."""
        address = self._listener.address
        return bytes(ADDRESS_BYTES) if address is None else address.encode()

    def meet(self, addresses: Mapping[int, bytes]) -> None:
        """Learn the addresses of all ranks of the channel, by global rank."""
        self._peers = {
            r: PeerAddress.decode(address) for r, address in addresses.items() if r != self._rank
        }

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
        if self._lost:
            raise self._failure(tag, 0.0, "a rank had been lost before")
        try:
            yield
        except RuntimeError as error:
            waited, answers = time.monotonic() - start, None
            if computing:
                if _ADVICE in str(error):  # an exchange in the body has named them
                    raise
                answers = self._ask()
                gone = answers.lost if waited >= self.seconds else answers.gone
                if not gone and not self._lost:
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
            while not all(map(has_ended, works)):
                waited = time.monotonic() - start
                if self._lost:
                    raise _GivenUpError("another rank found out")
                if self._closed:
                    raise _GivenUpError("the channel was closed on this rank")
                if waited >= self.seconds:
                    raise _GivenUpError("timed out")
                if waited >= next_s:
                    answers = self._ask()
                    next_s = min(next_s + ANSWER_SECONDS, last_s) if next_s < last_s else math.inf
                    if any(self._had_launched(rank) < self._launched for rank in answers.gone):
                        raise _GivenUpError("a rank is gone that it waits for")
        except RuntimeError as error:
            if self._closed and not self._lost:  # while a thread waited here: nobody is to blame
                raise
            waited = time.monotonic() - start
            # where an exchange broke, who answered before that may be gone now; at the end of the
            # timeout there is no time to ask again
            fresh = isinstance(error, _GivenUpError) or waited >= last_s
            answers = answers if fresh else None
            raise self._failure(tag, waited, str(error), answers) from error

    @override
    def close(self) -> None:
        """Take leave of the peers and stop answering.

        1. The last exchange of a job ends on rank 0 and is still on a slow link to rank 1.
        2. Rank 0 closes. Rank 1, which asks in vain, must not take it for dead.

        A thread of this rank that is still in `wait` gets an error at once, and blames nobody.
        """
        self._closed = True
        if self._listener.runs and not self._lost:
            self._ask({"left": {"rank": self._rank, **self._words()}})
        self._listener.close()

    @override
    def find_gone(self) -> dict[int, str]:
        """Return the ranks that are gone, with reasons, and tell the others of them."""
        if not self._lost:
            answers = self._ask()
            if answers.gone:
                self._learn(answers.gone)
                silent = answers.gone.keys() | answers.silent.keys()
                self._ask({"lost": self._lost}, skip=silent)
        return self._lost

    @property
    @override
    def can_ask(self) -> bool:
        return self._listener.runs and None not in self._peers.values()

    @override
    def tell(self, **told: Any) -> None:
        """Add `told`, plain values, to every answer from now on, in place of what was told."""
        self._told = told

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
        if self._lost or any(rank not in self._left for rank in answers.gone):
            raise self._failure(tag, 0.0, "asked where it is", answers)
        gone = {rank: {**self._left[rank], "closed": True} for rank in answers.gone}
        return answers.told | gone | {rank: {} for rank in answers.silent}

    # -- asking

    def _failure(
        self, tag: str, waited: float, cause: str, answers: Answers | None = None
    ) -> RuntimeError:
        if not self._lost:
            answers = answers or self._ask()
            lost = self._wider.find_gone() if answers.gone else {}
            self._learn(lost or self._blame(answers, tag, waited))
            # all have the news before this rank can leave; who knows better keeps what it knows
            self._ask({"lost": self._lost}, skip=answers.gone.keys() | answers.silent.keys())
        found = "; ".join(f"rank {rank} {reason}" for rank, reason in sorted(self._lost.items()))
        return RuntimeError(
            f"The exchange '{tag}' failed on rank {self._rank} after {waited:.1f} s"
            f" ({_first_line(cause)}): {found}. {_ADVICE}"
        )

    def _blame(self, answers: Answers, tag: str, waited: float) -> dict[int, str]:
        if answers.lost:
            return answers.lost
        behind = {rank: n for rank, n in answers.launched.items() if n < self._launched}
        if behind:
            return {
                rank: f"answers, but has launched {n} exchanges where rank {self._rank} has"
                f" launched {self._launched}: it is slow or hangs; if it was only slow, make"
                " `timeout` longer"
                for rank, n in behind.items()
            }
        return {
            self._rank: f"gave up on the exchange '{tag}' after {waited:.1f} s, although all other"
            " ranks that could be asked answer and are as far as it is; look at the network (a link"
            " that was down takes up to as long again: make `timeout` over twice an outage)"
        }

    def _ask(self, news: Mapping[str, Any] | None = None, skip: Collection[int] = ()) -> Answers:
        """Ask all peers at the same time, and tell them the `news`."""
        addresses = {r: c for r, c in self._peers.items() if c is not None and r not in skip}
        answers = Answers({}, {}, {}, {})
        if not addresses:
            return answers
        with ThreadPoolExecutor(max_workers=min(len(addresses), 64)) as callers:
            calls = {
                rank: callers.submit(ask, address, news or {}, self._patience)
                for rank, address in addresses.items()
            }
        for rank, call in calls.items():
            match call.result():
                case {"launched": int(launched), **told}:
                    answers.launched[rank] = launched
                    answers.told[rank] = {str(name): told[name] for name in told}
                case Silence(gone=False, reason=reason):
                    answers.silent[rank] = reason
                case Silence(reason=reason):
                    answers.gone[rank] = reason
                case _:
                    answers.gone[rank] = "is gone (another program answers at its address)"
        return answers

    # -- answering, in the listener's threads

    def _answer(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        match question:
            case {"lost": dict(told)}:
                known = {str(rank): rank for rank in (self._rank, *self._peers)}
                self._learn({known[r]: str(reason) for r, reason in told.items() if r in known})
            case {"left": {"rank": int(rank), "launched": int(), **words}}:
                self._left[rank] = {str(name): said for name, said in words.items()}
        return self._words()

    def _words(self) -> dict[str, Any]:
        return {**self._told, "launched": self._launched}

    def _had_launched(self, rank: int) -> int:
        """Return how far a rank was that has closed its channel; -1 if it has not."""
        return int(self._left.get(rank, {}).get("launched", -1))

    def _learn(self, lost: Mapping[int, str]) -> None:
        with self._lock:
            if not self._lost:
                self._lost = {r: lost[r][:_REASON_CHARACTERS] for r in sorted(lost)[:_NAMED]}


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0][:_REASON_CHARACTERS]
