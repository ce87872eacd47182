"""Exercises: a task, a check that says what is wrong, and no traceback.

    def verify(attempt):
        found = launch(attempt, torch.ones(4), world_size=4)
        for rank, tensor in enumerate(found):
            expect_equal(tensor, torch.full((4,), 4.0), "sum over the ranks", rank=rank)

    SUM = Exercise("sum_over_ranks", "add the ranks' tensors up, on every rank", verify)

    check(SUM, sum_over_ranks)      # in the notebook: passed / not solved yet / failed, and why

`check` prints its verdict and never raises, so that a notebook with unsolved exercises runs to
its end. Left out: scores, timing, and any memory of earlier attempts.
"""

from __future__ import annotations

import linecache
import site
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from playbook_utils.errors import CheckFailed, LaunchError, RankFailure
from playbook_utils.events import CollectiveEvent
from playbook_utils.measure.communication import CommunicationLog

__all__ = ["CheckResult", "Exercise", "check", "expect_calls", "expect_close", "expect_equal"]


@dataclass(frozen=True)
class Exercise:
    """A task and how its answer is checked."""

    name: str
    task: str
    """One line, shown while the exercise is not solved."""
    verify: Callable[[Any], object]
    """verify(attempt): raises CheckFailed where the attempt is wrong (see `expect_equal`)."""
    hints: tuple[str, ...] = ()
    """Shown after a failure that has no hint of its own."""


@dataclass(frozen=True, repr=False)
class CheckResult:
    """The verdict on one attempt; `check` has printed `text` already."""

    status: str
    """"passed", "not solved yet" or "failed"."""
    text: str

    @property
    def passed(self) -> bool:
        """Whether the attempt is right."""
        return self.status == "passed"

    def __repr__(self) -> str:
        return f"<{self.status}>"

    def _ipython_display_(self) -> None:
        """Nothing: as a cell's last value it would be shown a second time."""


def check(exercise: Exercise, attempt: Any) -> CheckResult:
    """Check `attempt`, print the verdict and return it; raises nothing.

    A stub that raises NotImplementedError, on whichever rank, is "not solved yet". An error in the
    attempt is "failed", with the error and the line that raised it.
    """
    result = _verdict(exercise, attempt)
    print(result.text)
    return result


def _verdict(exercise: Exercise, attempt: Any) -> CheckResult:
    try:
        exercise.verify(attempt)
    except CheckFailed as error:
        return _failed(exercise, str(error))
    except LaunchError as error:
        if error.failures and all(map(_is_stub_failure, error.failures)):
            return _unsolved(exercise, error.failures[0].summary.partition(": ")[2])
        checks = (f for f in error.failures if isinstance(f.exception, CheckFailed))
        told = (f"on rank {f.rank}: {f.exception}" for f in checks)
        return _failed(exercise, next(told, str(error)))
    except (Exception, SystemExit) as error:
        if isinstance(error, NotImplementedError) and _is_stub(error):
            return _unsolved(exercise, str(error))
        return _failed(exercise, _describe(error, exercise))
    return CheckResult("passed", f"passed: {exercise.name}")


def _unsolved(exercise: Exercise, line: str) -> CheckResult:
    return CheckResult("not solved yet", f"not solved yet: {line.strip() or exercise.task}")


def _failed(exercise: Exercise, message: str) -> CheckResult:
    lines = [f"failed: {exercise.name}", *message.rstrip().splitlines()]
    if not any(line.strip().startswith("hint: ") for line in lines):
        lines += [f"hint: {hint}" for hint in exercise.hints]
    return CheckResult("failed", "\n  ".join(lines))


def _is_stub(error: NotImplementedError) -> bool:
    """Raised by a line that says so; PyTorch too raises it, for what it cannot run."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0)
    return _is_own(frame.filename) and (not line or "NotImplementedError" in line)


def _is_stub_failure(failure: RankFailure) -> bool:
    stub = failure.summary.startswith("NotImplementedError")
    return stub and (not failure.traceback or "raise NotImplementedError" in failure.traceback)


def _describe(error: BaseException, exercise: Exercise) -> str:
    """The error and the learner's line, or that the answer itself could not be checked."""
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    verify = getattr(exercise.verify, "__code__", None)
    own = [
        traceback.FrameSummary(frame.f_code.co_filename, number, frame.f_code.co_name)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if _is_own(frame.f_code.co_filename) and frame.f_code is not verify
    ]
    if not own:
        return f"{said}\nraised while checking what it returned: of the right type and shape?"
    return f"{said}\nin {own[-1].name}, line {own[-1].lineno}: {own[-1].line}".rstrip(": ")


def _is_own(filename: str) -> bool:
    """A file of the learner: not of this package, of Python, or of an installed one."""
    paths = sysconfig.get_paths()
    others = [str(Path(__file__).parent.parent), *site.getsitepackages(), "<frozen"]
    others += [paths[name] for name in ("stdlib", "purelib", "platlib")]
    return not filename.startswith(tuple(others))


def expect_equal(
    found: object, expected: object, what: str, *, rank: int | None = None, hint: str = ""
) -> None:
    """Exact equality; tensors also in shape and dtype. Raises CheckFailed with `what`, both values,
    the rank and the hint."""
    if isinstance(expected, Tensor):
        wrong = _expect_like(found, expected, what, rank, hint) != expected
        if bool(wrong.any()):
            _fail(what, found, expected, rank, hint, wrong)
        return
    # 4.0 or True where a whole number was asked for: equal, and yet not what was asked for.
    another = type(expected) is int and type(found) is not int
    if isinstance(found, Tensor) or found != expected:
        _fail(what, found, expected, rank, hint)
    if another:
        hint = hint if isinstance(found, bool) else "a count is a whole number: use // or int()"
        _fail(f"{what} is {expected}, but its type", type(found).__name__, "int", rank, hint)


def expect_close(
    found: object,
    expected: Tensor | float,
    what: str,
    *,
    rtol: float = 1e-6,
    atol: float = 0.0,
    rank: int | None = None,
    hint: str = "",
) -> None:
    """|found - expected| <= atol + rtol * |expected|, element by element; tensors of equal shape.
    Raises CheckFailed as `expect_equal` does."""
    if isinstance(expected, Tensor):
        _expect_like(found, expected, what, rank, hint)
    elif isinstance(found, bool) or not isinstance(found, (int, float, Tensor)):
        _fail(what, found, expected, rank, hint)
    one, other = _wide(found), _wide(expected)
    if one.shape != other.shape:
        _fail(what, found, expected, rank, hint)
    wrong = ~torch.isclose(one, other, rtol=rtol, atol=atol)
    if bool(wrong.any()):
        _fail(what, found, expected, rank, hint, wrong)


def expect_calls(
    log: CommunicationLog | Sequence[CollectiveEvent],
    expected: Mapping[str, int],
    *,
    what: str = "communication calls",
    rank: int | None = None,
    hint: str = "",
) -> None:
    """Exactly these calls, {"send": 3, "recv": 3}, and none of any other kind: this sees through a
    right answer by a wrong method, one all_reduce posing as a ring. Raises CheckFailed."""
    events = log.events if isinstance(log, CommunicationLog) else log
    found = dict(Counter(event.op for event in events))
    expect_equal(found, {op: n for op, n in expected.items() if n}, what, rank=rank, hint=hint)


def _expect_like(found: object, expected: Tensor, what: str, rank: int | None, hint: str) -> Tensor:
    if not isinstance(found, Tensor):
        _fail(f"{what}: type", type(found).__name__, "Tensor", rank, hint)
    if found.shape != expected.shape:
        _fail(f"{what}: shape", tuple(found.shape), tuple(expected.shape), rank, hint)
    if found.dtype != expected.dtype:
        _fail(f"{what}: dtype", found.dtype, expected.dtype, rank, hint)
    return found


def _wide(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).detach()


def _fail(
    what: str, found: Any, expected: Any, rank: int | None, hint: str, wrong: Tensor | None = None
) -> NoReturn:
    """`wrong` (the tensors' shape) marks the elements that differ; the first one is told."""
    where = "" if rank is None else f" on rank {rank}"
    said, wanted = _short(found), _short(expected)
    if said == wanted:  # a tensor where a number was expected, say
        said, wanted = (f"{said} ({type(value).__name__})" for value in (found, expected))
    message = f"{what}{where}: found {said}, expected {wanted}"
    if wrong is not None and wrong.dim():
        index = tuple(wrong.nonzero()[0].tolist())
        message = (
            f"{what}{where}: found {found[index].item()}, expected {expected[index].item()} "
            f"at index {index}; {int(wrong.sum())} of {wrong.numel()} elements differ"
        )
    raise CheckFailed(message + (f"\nhint: {hint}" if hint else ""))


def _short(value: object) -> str:
    """One line of at most 80 characters."""
    text = str(value.item() if isinstance(value, Tensor) and value.numel() == 1 else value)
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:77] + "..."
