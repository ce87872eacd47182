"""Frames on a stream socket, and an anonymous file for what all ranks are sent.

A frame is one byte of kind, eight of length, then the payload. `FrameReader` collects frames
from a non-blocking socket; `send_frame` blocks. `anonymous_file` holds bytes without a name in
any folder, so that nothing has to be removed: it is gone when its last descriptor is closed.

Left out: what the frames mean (`worker`, `session`).
"""

from __future__ import annotations

import os
import socket
import struct
import tempfile
from collections.abc import Iterator

__all__ = ["BYE", "RAISED", "READY", "RESULT", "FrameReader", "anonymous_file", "send_frame"]

READY = b"Y"
"""Worker -> notebook: set up, and able to write down its position when signalled."""
RESULT = b"R"
"""Worker -> notebook: the pickled return value."""
RAISED = b"E"
"""Worker -> notebook: a pickled `worker.Raised`."""
BYE = b"B"
"""Notebook -> worker: every rank has returned, you may exit."""

_HEADER = struct.Struct("!cQ")
_CHUNK_BYTES = 1 << 20


def send_frame(sock: socket.socket, kind: bytes, payload: bytes | memoryview = b"") -> None:
    """Send one frame; blocks until the kernel has taken all of it."""
    sock.sendall(_HEADER.pack(kind, len(payload)))
    if len(payload):
        sock.sendall(payload)


class FrameReader:
    """Collects frames from a non-blocking socket, without copying large payloads twice."""

    def __init__(self) -> None:
        self._header = bytearray()
        self._kind = b""
        self._payload: bytearray | None = None
        self._filled = 0

    def read(self, sock: socket.socket) -> Iterator[tuple[bytes, bytearray]]:
        """Yield the frames that are complete; returns when nothing more is there to be read.

        Raises:
            EOFError: the other end is closed.
        """
        while True:
            try:
                if self._payload is None:
                    data = sock.recv(_HEADER.size - len(self._header))
                    count = len(data)
                    self._header += data
                else:
                    view = memoryview(self._payload)[self._filled :]
                    count = sock.recv_into(view, min(len(view), _CHUNK_BYTES))
                    self._filled += count
            except BlockingIOError:
                return
            except ConnectionError:
                count = 0
            if count == 0:
                raise EOFError("the worker closed its socket")
            yield from self._complete()

    def _complete(self) -> Iterator[tuple[bytes, bytearray]]:
        if self._payload is None:
            if len(self._header) < _HEADER.size:
                return
            self._kind, length = _HEADER.unpack(self._header)
            self._header.clear()
            self._payload, self._filled = bytearray(length), 0
        if self._filled == len(self._payload):
            payload, self._payload = self._payload, None
            yield self._kind, payload


def anonymous_file(content: bytes | memoryview = b"") -> int:
    """A descriptor of a file that has no name and holds `content`, read from position 0."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("playbook")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    view = memoryview(content)
    while len(view):
        view = view[os.write(fd, view) :]
    return fd
