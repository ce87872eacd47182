"""The words for a launch that failed: which ranks caused it, where the others stood.

A rank that only lost a peer ("connection closed") is no cause while another explains it. Equal
tracebacks are told once. Of a traceback the notebook's own lines are shown; those of the launcher
and of libraries are left out, but for the name of the library call that raised. Lines that repeat
are folded, and what is too long to read is cut in its middle, which the text says.

    raise failure(ranks, timeout_s)
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import signal
import site
import sys
import sysconfig
import traceback
from collections.abc import Sequence

from playbook_utils.errors import LaunchError, LaunchTimeout, RankFailure
from playbook_utils.workers import pickling, worker
from playbook_utils.workers.raised import SUMMARY_CHARS, Frame, Raised, cut
from playbook_utils.workers.rank import Rank

__all__ = ["cause", "failure", "is_cause", "is_whole", "library_folders", "shortage", "unreadable"]

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
# What the launcher's own part of a worker is doing, by the function of `worker` that it is in.
_STAGES = {
    worker.run.__name__: "",
    worker._prepare.__name__: "receiving the function and its arguments",
    worker._enter.__name__: "entering the notebook's folder and environment",
    worker._join.__name__: "joining the other ranks",
    worker._pickled_result.__name__: "sending its result back",
}
# Of these, tensors of different shapes on different ranks look like a deadlock.
_SHAPED = re.compile(
    r"(all_reduce|reduce|broadcast|(all_)?gather(_into_tensor)?|scatter|reduce_scatter(_tensor)?"
    r"|all_to_all(_single)?) \("
)
_SHAPES_HINT = (
    "\nif every rank makes this call, their tensors may differ in shape. To have PyTorch compare "
    'them,\nset os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL" before launch()'
)
_HERE = os.path.dirname(os.path.abspath(__file__))
MAX_REPORT_CHARS = 20_000
MAX_LINE_CHARS = 200
MAX_FRAMES = 24
MAX_CAUSES = 10


def is_cause(rank: Rank) -> bool:
    """Whether this rank failed by itself, not because it lost a peer."""
    if rank.raised is not None:
        return not _lost_peer(rank) and not _timed_out(rank)
    return rank.failed


def is_whole(dump: bytes | bytearray) -> bool:
    """Whether faulthandler, which writes line by line, has reached the outermost frame."""
    return b" in <module>\n" in dump


def failure(ranks: Sequence[Rank], timeout_s: float) -> LaunchError:
    """The error for ranks of which at least one did not return."""
    causes = [rank for rank in ranks if is_cause(rank)]
    deadlock = not causes and any(_timed_out(rank) for rank in ranks)
    positions = {rank.rank: _position(rank, deadlock) for rank in ranks}
    world = len(ranks)
    if deadlock:
        text = "deadlock: a collective reached its timeout, its ranks waited in vain\n"
        return LaunchTimeout(text + _where(positions) + _hint(positions), (), positions)
    if not causes and not any(rank.failed for rank in ranks):
        late = [rank.rank for rank in ranks if not rank.done]
        text = f"{_names(late, world)} did not finish within {timeout_s:g} s\n"
        return LaunchTimeout(text + _where(positions) + _hint(positions), (), positions)
    causes = causes or [rank for rank in ranks if rank.failed]
    failures = tuple(_rank_failure(rank) for rank in causes)
    text = f"{_names([f.rank for f in failures], world)} failed\n"
    text += cut(_tracebacks(failures), MAX_REPORT_CHARS)
    others = {r: p for r, p in positions.items() if r not in {f.rank for f in failures}}
    if others:
        text += "where the others were\n" + _where(others)
    return LaunchError(text, failures, positions)


def cause(error: LaunchError) -> BaseException | None:
    """The first rank's exception, as far as its whole text may be shown below the error's."""
    exception = error.failures[0].exception if error.failures else None
    with contextlib.suppress(Exception):  # what its class does to show it is not ours
        text = "".join(traceback.format_exception(exception)) if exception else ""
        return exception if len(text) < 2 * SUMMARY_CHARS else None
    return None


def shortage(error: OSError) -> str | None:
    """What this process lacks to start ranks, and what to do; None where it is something else."""
    if error.errno == errno.EMFILE:
        return (
            "this process may open no more files, and a launch needs 10 and 4 for each rank: "
            "close some, or raise the limit (ulimit -n in the shell that starts Jupyter)"
        )
    if error.errno in (errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC):
        return f"this machine has no room for more ranks ({error.strerror}): end other programs"
    return None


def unreadable(rank: int, error: Exception) -> LaunchError:
    """The error for a result that arrived but cannot be unpickled here."""
    summary = (
        f"the result of rank {rank} cannot be rebuilt in this process "
        f"({cut(f'{type(error).__name__}: {error}', SUMMARY_CHARS)}); return plain tensors, "
        "numbers, or for a DTensor its full_tensor()"
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
        "ranks whose tensors differ in shape or dtype do this)",
    }.get(name, "")
    return f"killed by {name}{hint}"


def _text(raised: Raised) -> str:
    blocks = [[raised.summary, *_frame_lines(raised.frames)]]
    blocks += [[f"{c.how} {c.summary}", *_frame_lines(c.frames)] for c in raised.causes]
    return "\n".join(_ends(blocks, MAX_CAUSES, "exceptions"))


def _frame_lines(sent: Sequence[Frame]) -> list[str]:
    frames = _inside(sent)
    blocks = []
    for frame, same in itertools.groupby(f for f in frames if not _is_library(f.file)):
        lines = [f"  {_place(frame)}, in {frame.function}"]
        if frame.text:
            lines.append(f"    {frame.text.strip()}")
        if repeats := len(list(same)) - 1:
            lines.append(f"    ... the same line {repeats} more times ...")
        blocks.append(lines)
    lines = _ends(blocks, MAX_FRAMES, "lines of the traceback")
    if frames and _is_library(frames[-1].file):
        last = frames[-1]
        lines.append(f"  then in {last.function} ({_short(last.file)}, line {last.line})")
    if stage := _stage(sent):
        lines.append(f"  while {stage}")
    return lines


def _ends(blocks: Sequence[list[str]], limit: int, what: str) -> list[str]:
    """The lines of all blocks, or of the first and last `limit` / 2 where there are more."""
    if len(blocks) > limit:
        gap = f"  ... {len(blocks) - 2 * (limit // 2)} {what} left out ..."
        blocks = [*blocks[: limit // 2], [gap], *blocks[-(limit // 2) :]]
    return [line for block in blocks for line in block]


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
            return f"had raised {cut(rank.raised.summary.splitlines()[0], MAX_LINE_CHARS)}"
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
    return _call(inner_first[::-1])


def _hint(positions: dict[int, str]) -> str:
    """Where all who wait are in one call: how shapes that differ would be seen."""
    calls = set(positions.values()) - {"had returned"}
    asked = os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL"
    return _SHAPES_HINT if len(calls) == 1 and _SHAPED.match(min(calls)) and not asked else ""


def _call(sent: Sequence[Frame]) -> str:
    """The library call in which a stack, outermost first, stands, and the own line of it."""
    frames = _inside(sent)
    own = [i for i, frame in enumerate(frames) if not _is_library(frame.file)]
    place = _place(frames[own[-1]]) if own else ""
    if stage := _stage(sent):
        return f"still {stage}" + (f", at {place}" if place else "")
    below = [frame.function for frame in frames[own[-1] + 1 if own else 0 :]]
    call = next((name for name in below if name not in _WRAPPERS), "")
    if not own:
        return call or "in compiled code, no Python line known"
    return f"{call} ({place})" if call else f"{place}, in {frames[own[-1]].function}"


def _stage(frames: Sequence[Frame]) -> str:
    """What of the launcher's own work a stack is in; "" where it is in the function."""
    return next((_STAGES[f.function] for f in reversed(frames) if _is_stage(f)), "")


def _inside(frames: Sequence[Frame]) -> list[Frame]:
    """The frames of the function, or of what is unpickled for it: none of the launcher's own."""
    above = max((i for i, frame in enumerate(frames) if _is_stage(frame)), default=-1)
    return [f for f in frames[above + 1 :] if os.path.dirname(f.file) != _HERE]


def _is_stage(frame: Frame) -> bool:
    return frame.file == worker.__file__ and frame.function in _STAGES


def _is_library(file: str) -> bool:
    return file.startswith(library_folders()) or file.startswith("<frozen ")


def library_folders() -> tuple[str, ...]:
    """Where code stands that is not the user's: Python's, installed packages, this wing."""
    known = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    base = os.path.join(sys.base_prefix, "lib")
    return (_HERE, base, site.getusersitepackages(), *known)


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
