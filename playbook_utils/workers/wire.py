"""Frames on a stream socket, and an anonymous file for what all ranks are sent.

A frame is one byte of kind, eight of length, then the payload. `FrameReader` collects frames
from a non-blocking socket; `send_frame` blocks. `anonymous_file` has no name in any folder, so
that nothing has to be removed: it is gone when its last descriptor is closed. `write_parts` fills
one, and `map_parts` gives each rank the same pages, copied when that rank writes to them.

Left out: what the frames mean (`worker`, `session`).
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Iterator, Sequence

__all__ = [
    "BUFFER", "BYE", "RAISED", "READY", "RESULT",
    "FrameReader", "anonymous_file", "map_parts", "send_frame", "write_parts",
]  # fmt: skip

READY = b"Y"
"""Worker -> notebook: set up, and able to write down its position when signalled."""
BUFFER = b"O"
"""Worker -> notebook: one large buffer of the return value that follows."""
RESULT = b"R"
"""Worker -> notebook: the pickled return value."""
RAISED = b"E"
"""Worker -> notebook: a pickled `worker.Raised`."""
BYE = b"B"
"""Notebook -> worker: every rank has returned, you may exit."""

_HEADER = struct.Struct("!cQ")
_CHUNK_BYTES = 1 << 20
_ALIGNMENT_BYTES = 64  # as PyTorch aligns what it allocates


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


def anonymous_file() -> int:
    """A descriptor of an empty file that has no name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("playbook")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def write_parts(fd: int, parts: Sequence[bytes | memoryview]) -> None:
    """Fill an empty file: the number of parts, their lengths, then each part, aligned."""
    lengths = [memoryview(part).nbytes for part in parts]
    with open(fd, "wb", closefd=False) as file:
        position = file.write(struct.pack(f"!{1 + len(parts)}Q", len(parts), *lengths))
        for part in parts:
            position += file.write(bytes(-position % _ALIGNMENT_BYTES))
            position += file.write(part)


def map_parts(fd: int) -> list[memoryview]:
    """The parts that `write_parts` wrote, writable; what is written stays in this process."""
    content = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))
    (number,) = struct.unpack_from("!Q", content)
    parts, position = [], 8 * (1 + number)
    for length in struct.unpack_from(f"!{number}Q", content, 8):
        position += -position % _ALIGNMENT_BYTES
        parts.append(content[position : position + length])
        position += length
    return parts
