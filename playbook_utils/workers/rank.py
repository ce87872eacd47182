"""What is known of one rank of a launch: filled by `session`, put in words by `report`."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from playbook_utils.workers import wire
from playbook_utils.workers.raised import Raised

__all__ = ["Rank"]


@dataclass
class Rank:
    """One rank of a launch."""

    rank: int
    pid: int
    task: socket.socket
    pipes: dict[str, int]
    """Read ends: {"stdout": fd, "stderr": fd, "dump": fd}."""
    reader: wire.FrameReader = field(default_factory=wire.FrameReader)
    ready: bool = False
    buffers: list[memoryview] = field(default_factory=list)
    """Large parts of the result, which came before it."""
    result: bytearray | None = None
    raised: Raised | None = None
    exit_code: int | None = None
    dump: bytearray = field(default_factory=bytearray)

    @property
    def done(self) -> bool:
        """It returned, raised, or is gone."""
        return self.result is not None or self.raised is not None or self.exit_code is not None

    @property
    def failed(self) -> bool:
        """It raised, or is gone without an answer."""
        return self.raised is not None or (self.result is None and self.exit_code is not None)
