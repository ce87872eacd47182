"""Check cases, time those that are right, and write the table.

    outcome = report(timed, checked, print)
    outcome.failed, outcome.agreed, outcome.not_run

`timed` and `checked` are groups of cases: where a group cannot be built, it counts as one failure
and the next group is tried. A name may be checked several times (dtypes, sizes); it is timed if it
was right each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kernels.gpu.case import Case, NotRunError

__all__ = ["Groups", "Outcome", "report", "selected"]

Groups = Iterable[Iterable[Case]]
Write = Callable[[str], None]

_HEADER = (
    f"{'kernel':40} {'dtype':9} {'error/allowed':>13} {'ms':>9} {'rate':>15}   PyTorch's own, "
    "and its time over the kernel's"
)


@dataclass
class Outcome:
    """What became of the cases."""

    failed: int = 0
    shares: dict[str, float] = field(default_factory=dict)
    """The largest error over what is allowed, of each name that was checked and right at least
    once."""
    wrong: set[str] = field(default_factory=set)
    not_run: dict[str, str] = field(default_factory=dict)
    """Names, and what they would have needed."""

    @property
    def agreed(self) -> set[str]:
        """Names that were right each time."""
        return set(self.shares) - self.wrong


def report(timed: Groups, checked: Groups, write: Write) -> Outcome:
    """Check each case of `checked`, then time the cases of `timed` whose name was right."""
    outcome = Outcome()
    for case in _attempted(checked, outcome, write):
        try:
            share = case.check()
            outcome.shares[case.name] = max(outcome.shares.get(case.name, 0.0), share)
        except NotRunError as error:
            if case.name not in outcome.not_run:
                write(f"{case.name:40} {_dtype(case):9} not run: {_first_line(error)}")
            outcome.not_run[case.name] = _first_line(error)
        except Exception as error:  # the next kernel is to be tried whatever this one did
            outcome.failed += 1
            outcome.wrong.add(case.name)
            write(f"{case.name:40} {_dtype(case):9} FAILED  {_named(error)}")
    write(_HEADER)
    for case in _attempted(timed, outcome, write):
        if case.name in outcome.agreed:
            try:
                write(_row(case, outcome.shares[case.name]))
            except Exception as error:
                outcome.failed += 1
                outcome.wrong.add(case.name)
                write(f"{case.name:40} {_dtype(case):9} FAILED  {_named(error)}")
    return outcome


def selected(groups: Groups, words: Sequence[str]) -> list[Iterator[Case]]:
    """The cases whose name contains one of `words`; all, if there are none."""

    def of_group(group: Iterable[Case]) -> Iterator[Case]:
        return (case for case in group if not words or any(word in case.name for word in words))

    return [of_group(group) for group in groups]


def _attempted(groups: Groups, outcome: Outcome, write: Write) -> Iterator[Case]:
    """The cases, group by group; what cannot be built is written, and its group ends."""
    for group in groups:
        try:
            yield from group
        except Exception as error:
            outcome.failed += 1
            write(f"{'(building the next case)':40} FAILED  {_named(error)}")


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


def _dtype(case: Case) -> str:
    return str(case.dtype).removeprefix("torch.")


def _row(case: Case, share: float) -> str:
    seconds = case.time_s()
    kernel_s = seconds.pop("kernel")
    rivals = "   ".join(f"{name} {s * 1e3:.3f} ({s / kernel_s:.2f})" for name, s in seconds.items())
    return (
        f"{case.name:40} {_dtype(case):9} {share:13.2f} {kernel_s * 1e3:9.3f} "
        f"{case.rate(kernel_s):>15}   {rivals}"
    )
