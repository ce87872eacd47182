"""The words for a launch that failed: which ranks caused it, where the others stood.

A rank that only lost a peer ("connection closed") is no cause while another explains it. Equal
tracebacks are told once. Of a traceback the notebook's own lines are shown; those of the launcher
and of libraries are left out, but for the name of the library call that raised.

    raise failure(ranks, timeout_s)
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import site
import sys
import sysconfig
from collections.abc import Iterable, Sequence

from playbook_utils.errors import LaunchError, LaunchTimeout, RankFailure
from playbook_utils.workers import pickling
from playbook_utils.workers.rank import Rank
from playbook_utils.workers.worker import Frame, Raised

__all__ = ["failure", "is_cause", "is_whole", "unreadable"]

_VICTIM = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|closed by peer"
    r"|remote process exited|Application timeout caused pair closure|NCCL.*remote error",
    re.IGNORECASE,
)
_TIMED_OUT = re.compile(
    r"Timed out waiting|Wait timeout|timed out after|Timed out initializing|wait timeout after",
    re.IGNORECASE,
)
# Only what a collective raises can be a victim's or a deadlock's error; a program's own
# TimeoutError is a cause like any other.
_COLLECTIVE = re.compile(r"^(RuntimeError|torch\.distributed\.Dist\w*Error): ")
_DUMP_LINE = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.M)
_WRAPPERS = {"wrapper", "inner", "_fn", "wrapped"}


def is_cause(rank: Rank) -> bool:
    """Whether this rank failed by itself, not because it lost a peer."""
    if rank.raised is not None:
        return not _lost_peer(rank) and not _timed_out(rank)
    return rank.failed


def is_whole(dump: bytes | bytearray) -> bool:
    """Whether faulthandler, which writes line by line, has reached the outermost frame."""
    return b" in main\n" in dump or b" in <module>\n" in dump


def failure(ranks: Sequence[Rank], timeout_s: float) -> LaunchError:
    """The error for ranks of which at least one did not return."""
    causes = [rank for rank in ranks if is_cause(rank)]
    deadlock = not causes and any(_timed_out(rank) for rank in ranks)
    positions = {rank.rank: _position(rank, deadlock) for rank in ranks}
    world = len(ranks)
    if deadlock:
        text = "deadlock: a collective reached its timeout, its ranks waited in vain\n"
        return LaunchTimeout(text + _where(positions), (), positions)
    if not causes and not any(rank.failed for rank in ranks):
        late = [rank.rank for rank in ranks if not rank.done]
        text = f"{_names(late, world)} did not finish within {timeout_s:g} s\n"
        return LaunchTimeout(text + _where(positions), (), positions)
    causes = causes or [rank for rank in ranks if rank.failed]
    failures = tuple(_rank_failure(rank) for rank in causes)
    text = f"{_names([f.rank for f in failures], world)} failed\n" + _tracebacks(failures)
    others = {r: p for r, p in positions.items() if r not in {f.rank for f in failures}}
    if others:
        text += "where the others were\n" + _where(others)
    return LaunchError(text, failures, positions)


def unreadable(rank: int, error: Exception) -> LaunchError:
    """The error for a result that arrived but cannot be unpickled here."""
    summary = (
        f"the result of rank {rank} cannot be rebuilt in this process "
        f"({type(error).__name__}: {error}); return plain tensors or numbers, "
        "for a DTensor its full_tensor()"
    )
    return LaunchError(summary, (RankFailure(rank, summary),))


def _timed_out(rank: Rank) -> bool:
    return bool(_TIMED_OUT.search(_collective_error(rank)))


def _lost_peer(rank: Rank) -> bool:
    return bool(_VICTIM.search(_collective_error(rank)))


def _collective_error(rank: Rank) -> str:
    """What a collective raised on this rank, or nothing."""
    summary = rank.raised.summary if rank.raised is not None else ""
    return summary if _COLLECTIVE.match(summary) else ""


def _rank_failure(rank: Rank) -> RankFailure:
    raised = rank.raised
    if raised is None:
        return RankFailure(rank.rank, _how_it_ended(rank.exit_code))
    exception = None
    # What it needs may exist in the worker only; the text is there in any case.
    with contextlib.suppress(Exception):
        exception = pickling.loads(raised.pickled) if raised.pickled else None
    return RankFailure(rank.rank, raised.summary, _text(raised), exception)


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is None:
        return "ended without an answer"
    if exit_code >= 0:
        return f"the process exited with code {exit_code} before the function returned"
    known = {int(number): number.name for number in signal.Signals}
    name = known.get(-exit_code, f"signal {-exit_code}")
    hint = {
        "SIGKILL": " (out of memory, or killed from outside)",
        "SIGSEGV": " (a crash in compiled code)",
        "SIGABRT": " (compiled code gave up: its message is in the output above; with gloo, "
        "ranks that pass different shapes to one collective do this)",
    }.get(name, "")
    return f"killed by {name}{hint}"


def _text(raised: Raised) -> str:
    lines = [raised.summary, *_frame_lines(raised.frames)]
    for summary, frames in raised.causes:
        lines += [f"caused by {summary}", *_frame_lines(frames)]
    return "\n".join(lines)


def _frame_lines(frames: Iterable[Frame]) -> list[str]:
    frames = list(frames)
    own = [i for i, frame in enumerate(frames) if not _is_library(frame.file)]
    lines = []
    for i in own:
        frame = frames[i]
        lines.append(f"  {_place(frame)}, in {frame.function}")
        if frame.text:
            lines.append(f"    {frame.text.strip()}")
    if frames and (not own or own[-1] < len(frames) - 1):
        last = frames[-1]
        lines.append(f"  then in {last.function} ({_short(last.file)}, line {last.line})")
    return lines


def _tracebacks(failures: Sequence[RankFailure]) -> str:
    groups: dict[str, list[int]] = {}
    for one in failures:
        groups.setdefault(one.traceback or one.summary, []).append(one.rank)
    return "".join(f"{_names(ranks)}: {text}\n" for text, ranks in groups.items())


def _where(positions: dict[int, str]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, position in positions.items():
        groups.setdefault(position, []).append(rank)
    return "\n".join(f"  {_names(ranks)}: {position}" for position, ranks in groups.items())


def _names(ranks: Sequence[int], world_size: int | None = None) -> str:
    if world_size is not None and len(ranks) == world_size > 1:
        return f"all {world_size} ranks"
    of = f" of {world_size}" if world_size is not None else ""
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(map(str, ranks))}{of}"


def _position(rank: Rank, deadlock: bool) -> str:
    if rank.result is not None:
        return "had returned"
    if rank.raised is not None:
        frames = list(rank.raised.frames)
        if not (_timed_out(rank) or _lost_peer(rank)):
            return f"had raised {rank.raised.summary.splitlines()[0]}"
        # Of a deadlock the first to reach the timeout closes its connections: no news.
        ending = "" if deadlock or _timed_out(rank) else ", where it lost a peer"
        return _call(frames) + ending
    if rank.exit_code is not None:
        return _how_it_ended(rank.exit_code)
    if not rank.ready:
        return "still starting"
    dump = bytes(rank.dump).decode("utf-8", "replace")
    inner_first = [
        Frame(m["file"], int(m["line"]), m["function"]) for m in _DUMP_LINE.finditer(dump)
    ]
    return _call(inner_first[::-1]) if inner_first else "in compiled code, no Python line known"


def _call(frames: list[Frame]) -> str:
    """The library call in which a stack, outermost first, stands, and the own line of it."""
    own = [i for i, frame in enumerate(frames) if not _is_library(frame.file)]
    if not own:
        return f"{frames[-1].function} (before the function began)" if frames else "unknown"
    place = _place(frames[own[-1]])
    for frame in frames[own[-1] + 1 :]:
        if frame.function not in _WRAPPERS:
            return f"{frame.function} ({place})"
    return f"{place}, in {frames[own[-1]].function}"


def _is_library(file: str) -> bool:
    return file.startswith(_library_folders()) or file.startswith("<frozen ")


def _library_folders() -> tuple[str, ...]:
    here = os.path.dirname(os.path.abspath(__file__))
    paths = sysconfig.get_paths()
    known = [paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"]]
    return (*known, site.getusersitepackages(), here, os.path.join(sys.base_prefix, "lib"))


def _place(frame: Frame) -> str:
    return f"{_cell_name(frame.file) or _short(frame.file)}, line {frame.line}"


def _cell_name(file: str) -> str | None:
    """ "Cell In[5]" for the file name that IPython gave to a cell, else None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    names = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return f"Cell In[{names[file]}]" if file in names else None


def _short(file: str) -> str:
    return os.path.join(*file.split(os.sep)[-2:]) if os.sep in file else file
