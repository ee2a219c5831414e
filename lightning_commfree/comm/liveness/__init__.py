"""Who is gone? A second line between the ranks of a channel, used when an exchange fails.

A collective that fails does not say on whose account. Some ranks hear "connection closed by peer"
at once, others wait, and whoever hears it first leaves and is then blamed by the rest. So:

1. Rank 1 is killed. The exchange fails on rank 0, which talks to it; ranks 2 and 3 still wait.
2. Rank 0 asks everybody. Rank 1 refuses, ranks 2 and 3 answer. Rank 0 tells them that rank 1 is
   gone, and only then raises.
3. Ranks 2 and 3 were told, so they raise at once and name rank 1, though rank 0 has left as well.

gloo overlooks a death now and then, so a rank that waits for long asks too. A rank that hangs still
accepts connections (its kernel does), therefore an *answer* is asked for:

======== ================= =====================================================================
question `lost` (optional) reason by rank: what the asking rank has found out
question `left` (optional) the rank that closes its channel, and its last answer
answer   `launched`        exchanges that the rank has launched on this channel
answer   others            what the rank tells about itself (`tell`)
======== ================= =====================================================================

While training goes well and an exchange takes less than `ANSWER_SECONDS`, nothing travels here but
a word of leave at the end. `comm.meeting` asks by the same line where the others are.

Read `port` (answering), `questions` (asking), `blame`, then `watch`.

Ports, and what an outsider can do to them
------------------------------------------
- Each process listens on one TCP port per open channel of several ranks, three at most, which the
  kernel chooses, as gloo's are chosen; on the interface that gloo uses (`GLOO_SOCKET_IFNAME`, else
  the address of the host name, else 127.0.0.1). The ranks learn the addresses by the channel.
- One line of JSON comes and one goes. Nothing is pickled, run or written. All connections share one
  thread; there are 256 at a time, of more the oldest goes; each has 5 seconds and 16 KiB.
- A question names a key of 32 random bits, else there is no answer. It travels unencrypted: it
  keeps out strangers, not those who read the network. An answer names none.
- A stranger without the key can at worst take all 256 places again and again, so that a rank looks
  silent. That ends nothing by itself: it is blamed where an exchange fails or times out anyway,
  and ranks that ask where it is wait for the timeout.
- Who has the key, or takes the port of a rank that has ended, can end the job with an error that
  names the wrong rank, or end a fit early. Nobody can change weights, run code or read anything
  but a few numbers about steps.

gloo's own ports beside it ask for no key at all. A private network or a tunnel is needed for both.

Switched off
------------
`Channel.open(..., liveness=False)`, or the attribute `liveness = False` of a strategy before `fit`:
no port, no thread. What is lost: after a rank's death the others may wait for the whole `timeout`,
and no error names a rank. Ranks cannot be asked where they are: under DiLoCo, uneven data then end
in a timeout where a validation or a checkpoint falls between; under Lion and Domino a
`trainer.should_stop` that is set between two steps ends the fit one step later.
"""

from __future__ import annotations

from lightning_commfree.comm.liveness.questions import ADDRESS_BYTES
from lightning_commfree.comm.liveness.unwatched import Unwatched
from lightning_commfree.comm.liveness.watch import TAG, PeerWatch

__all__ = ["ADDRESS_BYTES", "TAG", "PeerWatch", "Unwatched"]
