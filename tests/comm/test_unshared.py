"""A rank that is killed while processes that it has forked off live on."""

from __future__ import annotations

import multiprocessing
import os
import socket
from typing import Any

from lightning_commfree.comm.sockets import CloseOnFork


def look(unshared: CloseOnFork, descriptors: list[int], pipe: Any) -> None:
    pipe.send([os.path.exists(f"/dev/fd/{descriptor}") for descriptor in descriptors])


def test_children_close_what_was_opened_and_nothing_else() -> None:
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    unshared = CloseOnFork()
    with socket.socket() as before, socket.socket() as listener:
        with unshared.opening():
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            first = socket.create_connection(listener.getsockname())
            local, _ = socket.socketpair()
            replaced = socket.create_connection(listener.getsockname())
        descriptor = replaced.fileno()
        replaced.close()
        after = socket.socket()
        assert after.fileno() == descriptor, "the kernel gives the lowest that is free"
        opened = [before, listener, first, local, after]
        child = context.Process(
            target=look, args=(unshared, [one.fileno() for one in opened], theirs)
        )
        child.start()
        assert mine.recv() == [True, True, False, True, True]
        child.join()
        listener.accept()[0].sendall(b"here")  # the parent's own are as they were
        assert first.recv(4) == b"here"
        for one in (first, local, after):
            one.close()
