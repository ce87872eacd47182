"""`playbook progress`: which exercises are solved, and reset one.

A lesson is read as it was saved: what `check` said last stands in the exercise's output. An
exercise's cell carries its stub in its metadata, where `playbook refresh` puts it.

Left out: running anything; a verdict is as old as the cell's last run.

    playbook progress
    playbook progress 06 --reset average_gradients
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playbook_utils.commands.execution import read_notebook
from playbook_utils.commands.lessons import add_folder_option, find_folder, select
from playbook_utils.notebooks.length import EXERCISE

__all__ = ["Answer", "add_arguments", "answers", "reset", "run"]

DESCRIPTION = (
    "Which exercises of the saved notebooks are solved, failed or not tried. With --reset, puts "
    "one exercise back as it was; the answer that stood there is printed."
)


@dataclass(frozen=True)
class Answer:
    """One exercise of a saved lesson."""

    name: str
    kind: str
    """ "core" or "more"; "" where the text does not say."""
    status: str
    """ "passed", "failed" or "not solved yet", as `check` said last; "not run" if it did not."""
    cell: Any
    """The cell of the notebook, as nbformat reads it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.add_argument("lessons", nargs="*", metavar="LESSON", help="06 or a path (default: all)")
    parser.add_argument("--reset", metavar="EXERCISE", help="put this one back; name its lesson")
    add_folder_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit status."""
    paths = select(arguments.lessons, arguments.notebooks or find_folder())
    if arguments.reset is None:
        print(as_table({path.stem: answers(read_notebook(path)) for path in paths}))
        return 0
    if len(paths) != 1:
        raise ValueError("--reset needs one lesson: playbook progress 06 --reset EXERCISE")
    print(reset(paths[0], arguments.reset))
    print(f"\n{paths[0].name}: {arguments.reset} is as it was. Is it open? Reload it from disk.")
    return 0


def answers(notebook: Any) -> list[Answer]:
    """The exercises of a notebook, in order."""
    found, kind = [], ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (marks := EXERCISE.findall(cell.source)):
            kind = marks[-1][0]
        if "exercise" in cell.metadata.get("tags", []):
            found.append(Answer(_name(cell), kind, _status(cell), cell))
    return found


def _name(cell: Any) -> str:
    """What the stub defines; an answer that is no Python has the same name."""
    match = re.search(r"^(?:def|class) (\w+)", cell.metadata.get("stub", cell.source), re.MULTILINE)
    return match.group(1) if match else str(cell.id)


def _status(cell: Any) -> str:
    printed = "".join(o.text for o in cell.outputs if o.output_type == "stream")
    verdicts = re.findall(r"^(passed|failed|not solved yet): ", printed, re.MULTILINE)
    return verdicts[-1] if verdicts else "not run"


def as_table(lessons: dict[str, list[Answer]]) -> str:
    """A line a lesson: solved of all, core and more, and the names of those that are open."""
    width = max(len("lesson"), *map(len, lessons))
    lines = [f"{'lesson':<{width}}  {'core':>7}  {'more':>7}  open"]
    for name, found in lessons.items():
        counts = [_count([a for a in found if a.kind == kind]) for kind in ("core", "more")]
        left = [
            a.name + " (failed)" * (a.status == "failed") for a in found if a.status != "passed"
        ]
        lines.append(f"{name:<{width}}  {counts[0]:>7}  {counts[1]:>7}  {', '.join(left) or '-'}")
    return "\n".join(lines)


def _count(found: Sequence[Answer]) -> str:
    return f"{sum(a.status == 'passed' for a in found)} of {len(found)}" if found else "-"


def reset(path: Path, name: str) -> str:
    """Put the stub back into exercise `name` of this notebook; returns the answer that stood there.

    Raises ValueError where there is no such exercise, or its cell carries no stub.
    """
    from playbook_utils.commands.refresh import as_bytes, replace

    notebook = read_notebook(path)
    found = {answer.name: answer.cell for answer in answers(notebook)}
    if name not in found:
        raise ValueError(f"no exercise {name!r} in {path.name}; there are: {', '.join(found)}")
    cell = found[name]
    if "stub" not in cell.metadata:
        raise ValueError(
            f"the cell of {name!r} lost its stub: take {path.name} from the repository"
        )
    old: str = cell.source
    cell.source, cell.outputs, cell.execution_count = cell.metadata["stub"], [], None
    replace(path, as_bytes(notebook))
    return old
