"""One launch, seen from the notebook: start the ranks, read all they send, end them.

One loop in the cell's own thread reads every rank's answer, output and exit, so that output lands
in the right cell and an interrupt is seen at once. Whatever happens, all ranks are ended before
`Session.run` returns or raises.

Left out: processes (`servers`), the words of an error (`report`), checking arguments (`launcher`).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from playbook_utils.workers import pickling, report, wire
from playbook_utils.workers.output import RankedOutput
from playbook_utils.workers.rank import Rank
from playbook_utils.workers.servers import Server
from playbook_utils.workers.worker import Descriptors

__all__ = ["Session", "rendezvous_file"]

GATHER_S = 0.3
"""After each failure: how long others may still fail of themselves before all are stopped."""
VICTIM_GATHER_S = 1.0
"""The same while only ranks that lost a peer have failed: the cause is still to come."""
DUMP_S = 0.5
POLL_S = 0.05
START_TIMEOUT_S = 120.0
_READ_BYTES = 1 << 16  # what a pipe holds


class Session:
    """The ranks of one launch."""

    def __init__(self, server: Server, world_size: int, output: RankedOutput) -> None:
        self._server = server
        self._world_size = world_size
        self._output = output
        self._selector = selectors.DefaultSelector()
        self._cleanup = ExitStack()
        self.ranks: list[Rank] = []

    def run(self, payload: int, rendezvous: int, timeout_s: float) -> list[Any]:
        """Run the function of `payload` on all ranks; returns the results in rank order.

        Raises:
            LaunchError, LaunchTimeout: a rank failed, or all stood still.
            PlaybookError: the server is gone.
        """
        try:
            with self._cleanup:
                self._cleanup.callback(self._selector.close)
                self._cleanup.callback(self._end)
                self._start(payload, rendezvous)
                self._wait(START_TIMEOUT_S, lambda rank: rank.ready or rank.done)
                self._wait(timeout_s, lambda rank: rank.done)
                self._ask_positions()
                for rank in self.ranks:
                    self._read_rest(rank)
                if not all(rank.result is not None for rank in self.ranks):
                    raise report.failure(self.ranks, timeout_s)
                for rank in self.ranks:
                    with contextlib.suppress(OSError):  # gone by itself, after its answer
                        wire.send_frame(rank.task, wire.BYE)
        finally:
            self._output.close()
        return [self._result(rank) for rank in self.ranks]

    def _end(self) -> None:
        try:
            self._server.end()
        except KeyboardInterrupt:  # a second one, of an impatient hand
            self._server.end()
            raise

    def _start(self, payload: int, rendezvous: int) -> None:
        if self._server.fileno() >= 0:
            self._selector.register(self._server.fileno(), selectors.EVENT_READ)
        for number in range(self._world_size):
            ours, theirs = socket.socketpair()
            with ExitStack() as child_ends:
                child_ends.enter_context(theirs)
                self._cleanup.callback(ours.close)
                reads, writes = {}, {}
                for name in ("stdout", "stderr", "dump"):
                    reads[name], writes[name] = os.pipe()
                    child_ends.callback(os.close, writes[name])
                    self._cleanup.callback(os.close, reads[name])
                    os.set_blocking(reads[name], False)
                fds = Descriptors(theirs.fileno(), **writes, payload=payload, rendezvous=rendezvous)
                rank = Rank(number, self._server.start(number, fds), ours, reads)
            ours.setblocking(False)
            self.ranks.append(rank)
            self._selector.register(ours, selectors.EVENT_READ, (rank, "task"))
            for name, fd in reads.items():
                self._selector.register(fd, selectors.EVENT_READ, (rank, name))

    def _wait(self, timeout_s: float, arrived: Callable[[Rank], bool]) -> None:
        """Until all have arrived, or one has failed and its peers had time to, or the timeout."""
        deadline = time.monotonic() + timeout_s
        num_failed, failed_at = 0, deadline
        while not all(arrived(rank) for rank in self.ranks):
            now = time.monotonic()
            failed = sum(rank.failed for rank in self.ranks)
            if failed > num_failed:  # others may fail of the same cause a moment later
                num_failed, failed_at = failed, now
            if num_failed:
                only_victims = not any(report.is_cause(rank) for rank in self.ranks)
                if now > failed_at + (VICTIM_GATHER_S if only_victims else GATHER_S):
                    break
            if now > deadline:
                break
            self._read(min(POLL_S, max(0.0, deadline - now)))

    def _ask_positions(self) -> None:
        """Have the ranks that still run write down where they are."""
        running = [rank for rank in self.ranks if rank.ready and not rank.done]
        if not running:
            return
        self._server.signal([rank.pid for rank in running], signal.SIGUSR1)
        until = time.monotonic() + DUMP_S
        while time.monotonic() < until and not all(report.is_whole(r.dump) for r in running):
            self._read(0.02)

    def _read(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.data is not None:
                rank, name = key.data
                try:
                    self._read_one(rank, name)
                except EOFError:
                    self._selector.unregister(key.fileobj)
        exited = self._server.exited()
        for rank in self.ranks:
            if rank.pid in exited:
                self._read_rest(rank)
                rank.exit_code = exited[rank.pid]
            if rank.done and not rank.failed:
                self._read_rest(rank)
                self._output.finish(rank.rank)

    def _read_one(self, rank: Rank, name: str) -> None:
        """Read what is there now.

        Raises:
            EOFError: the worker's end is closed.
        """
        if name == "task":
            for kind, data in rank.reader.read(rank.task):
                if kind == wire.READY:
                    rank.ready = True
                elif kind == wire.BUFFER:
                    rank.buffers.append(memoryview(data))
                elif kind == wire.RESULT:
                    rank.result = data
                else:
                    rank.raised = pickle.loads(data)
            return
        try:
            text = os.read(rank.pipes[name], _READ_BYTES)
        except BlockingIOError:
            return
        if not text:
            raise EOFError
        if name == "dump":
            rank.dump += text
        else:
            self._output.feed(rank.rank, name, text)

    def _read_rest(self, rank: Rank) -> None:
        """What a rank wrote before it answered or went is in its pipes: take all of it.

        One read has all that a pipe holds; more may be coming without end, of what the rank left.
        """
        for name in ("task", *rank.pipes):
            with contextlib.suppress(EOFError):
                self._read_one(rank, name)

    def _result(self, rank: Rank) -> Any:
        assert rank.result is not None
        data, rank.result = rank.result, None
        buffers, rank.buffers = rank.buffers, []
        try:
            return pickling.loads(data, buffers)
        except Exception as error:
            raise report.unreadable(rank.rank, error) from error


def rendezvous_file(stack: ExitStack, server: Server) -> tuple[int, str | None]:
    """Where the ranks find each other: a file without a name, or one in a folder that is removed.

    Returns its descriptor, and its path where the descriptor is of no use to a worker.
    """
    if hasattr(os, "memfd_create") and server.fileno() >= 0:
        fd = wire.anonymous_file()
        stack.callback(os.close, fd)
        return fd, None
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="playbook-launch-"))
    return -1, os.path.join(folder, "rendezvous")
