"""Every exception of the package, in one place.

All are a PlaybookError, but for LaunchInterrupted, a KeyboardInterrupt. Bad arguments raise
`ValueError` (or `TypeError`); those are not listed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TypeVar

__all__ = [
    "CheckFailed", "LaunchError", "LaunchInterrupted", "LaunchTimeout", "NestedLaunchError",
    "NotEquivalent", "NotebookImportError", "PlaybookError", "RankFailure", "StaleNotebookError",
    "without_frames",
]  # fmt: skip

E = TypeVar("E", bound=BaseException)


class PlaybookError(Exception):
    """Base of the package's own errors."""


@dataclass(frozen=True)
class RankFailure:
    """Why one rank failed."""

    rank: int
    summary: str
    """One line: "ValueError: batch of 5 does not divide", "killed by SIGKILL"."""
    traceback: str = ""
    """The rank's own frames, the launcher's left out; empty for a killed process."""
    exception: BaseException | None = None
    """The exception itself, where it could be pickled."""


def without_frames(error: E) -> E:
    """The error, of which a notebook shows the message alone: our own frames tell nobody anything.

    In a plain script the traceback begins anew where it is raised.
    """
    error._render_traceback_ = partial(_message_lines, error)  # type: ignore[attr-defined]
    return error.with_traceback(None)


def _message_lines(error: BaseException) -> list[str]:  # IPython's protocol
    return f"{type(error).__name__}: {error}".splitlines()


class LaunchError(PlaybookError):
    """At least one rank failed; all ranks were stopped."""

    def __init__(
        self,
        message: str,
        failures: tuple[RankFailure, ...] = (),
        positions: dict[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.failures = failures
        """The ranks that caused it; those that only lost a peer are not among them."""
        self.positions = positions or {}
        """Where each rank was when all were stopped: {rank: "all_reduce (Cell In[5], line 4)"}."""

    @property
    def rank(self) -> int | None:
        """The first rank that failed, or None where no single rank is to blame."""
        return self.failures[0].rank if self.failures else None


class LaunchTimeout(LaunchError):
    """The ranks no longer made progress: a deadlock, an endless loop, or too short a timeout."""


class NestedLaunchError(PlaybookError):
    """`launch` was called inside a worker that `launch` started."""


class LaunchInterrupted(KeyboardInterrupt):
    """The kernel was interrupted while workers ran; all of them were stopped."""


class CheckFailed(PlaybookError, AssertionError):
    """What was checked is wrong; the message says what was found and expected, on which rank."""


class NotEquivalent(CheckFailed):
    """A technique does not train like one process does."""


class NotebookImportError(PlaybookError, ImportError):
    """A notebook's exported cells cannot be imported; the message names notebook and cell."""


class StaleNotebookError(NotebookImportError):
    """A worker would read a newer notebook than the kernel did: restart the kernel."""
