"""An exception as a worker sends it: its text and frames always arrive, itself where it can.

    wire.send_frame(task, wire.RAISED, pickle.dumps(describe(error)))

A text is cut in its middle; the frames and causes are all sent (`report` folds them). Left out:
`__cause__`, `__context__` and the traceback of the exception object that arrives.
"""

from __future__ import annotations

import contextlib
import traceback
from dataclasses import dataclass
from typing import Any

from playbook_utils.workers import pickling

__all__ = ["SUMMARY_CHARS", "Cause", "Frame", "Raised", "cut", "describe"]

SUMMARY_CHARS = 4000
LINE_CHARS = 300


@dataclass(frozen=True)
class Frame:
    """One line of a traceback."""

    file: str
    line: int
    function: str
    text: str = ""


@dataclass(frozen=True)
class Cause:
    """An exception that led to another, or is a member of an ExceptionGroup."""

    how: str
    """ "caused by", "member 1 of 2"."""
    summary: str
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class Raised:
    """An exception as it is sent to the notebook."""

    summary: str
    frames: tuple[Frame, ...]
    causes: tuple[Cause, ...] = ()
    """The exceptions that led to it, nearest first; the members of a group before its cause."""
    pickled: bytes | None = None


class _WithoutInit:
    """Pickles as an exception that is rebuilt without its `__init__`.

    Pickle itself calls `cls(*error.args)`: wrong where `__init__` hands other arguments than its
    own to `super().__init__`.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self._error), self._error.args, vars(self._error))


def _rebuild(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    error = cls.__new__(cls, *args)
    error.args = args
    vars(error).update(state)
    return error


def cut(text: str, limit: int) -> str:
    """`text`, of which the middle is left out where it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    tail = limit // 4
    left_out = len(text) - limit
    return f"{text[: limit - tail]} ... {left_out:,} characters left out ... {text[-tail:]}"


def describe(error: BaseException) -> Raised:
    """Turn an exception into something that always arrives."""
    (_, first), *causes = _related(error)
    told = tuple(Cause(how, _summary(one), _frames(one)) for how, one in causes)
    return Raised(_summary(first), _frames(first), told, _pickled(error))


def _related(error: BaseException) -> list[tuple[str, BaseException]]:
    """The exception, and how those that led to it belong to it."""
    found: list[tuple[str, BaseException]] = []
    seen: set[int] = set()
    waiting: list[tuple[str, BaseException]] = [("", error)]
    while waiting:
        how, one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        found.append((how, one))
        cause = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
        if cause is not None:
            waiting.append(("caused by", cause))
        members: Any = ()
        with contextlib.suppress(BaseException):  # a property of the user's may raise
            members = getattr(one, "exceptions", ())  # of an ExceptionGroup, not in Python 3.10
        if isinstance(members, (tuple, list)):
            total = len(members)
            named = [(f"member {i} of {total}:", m) for i, m in enumerate(members, 1)]
            waiting += [(how, m) for how, m in reversed(named) if isinstance(m, BaseException)]
    return found


def _summary(error: BaseException) -> str:
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    return cut(text, SUMMARY_CHARS)


def _frames(error: BaseException) -> tuple[Frame, ...]:
    return tuple(
        Frame(f.filename, f.lineno or 0, f.name, cut(f.line or "", LINE_CHARS))
        for f in traceback.extract_tb(error.__traceback__)
    )


def _pickled(error: BaseException) -> bytes | None:
    for sent in (error, _WithoutInit(error)):
        try:
            data = bytes(pickling.dumps(sent).data)
            if str(pickling.loads(data)) == str(error):  # else its `__init__` added to its text
                return data
        except BaseException:  # whatever its own methods raise
            continue
    return None
