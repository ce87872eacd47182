"""How long a lesson is: cells, words and lines of its core path, and the minutes they take.

The core path ends at the heading `## Going further`. What is folded (`<details>`) does not count,
nor does an exercise marked "more". An exercise says so in its text: "core, 5 minutes".

    length(Path("notebooks/06_data_parallelism.ipynb")).minutes     # 60
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from playbook_utils.notebooks.cells import read_cells

__all__ = ["EXERCISE", "LINES_PER_MINUTE", "WORDS_PER_MINUTE", "Length", "length"]

WORDS_PER_MINUTE = 200
LINES_PER_MINUTE = 10
_END = re.compile(r"^## Going further", re.MULTILINE)
_FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)
_NOT_WORDS = re.compile(r"\]\([^)]*\)|<[^>]*>|^\|[-|: ]+\|$|[|#>*]", re.MULTILINE)
EXERCISE = re.compile(r"\b(core|more), (\d+) minutes?\b")
"""An exercise's mark in the text before its cell: ("core", "5")."""


@dataclass(frozen=True)
class Length:
    """What stands on the core path of one lesson."""

    cells: int
    words: int
    lines: int
    """Lines of code that are not empty."""
    exercise_minutes: int
    """Of the exercises marked "core", wherever they stand."""

    @property
    def minutes(self) -> int:
        """Reading the words and the code, and doing the exercises; in steps of five."""
        reading = self.words / WORDS_PER_MINUTE + self.lines / LINES_PER_MINUTE
        return max(5, 5 * round((reading + self.exercise_minutes) / 5))


def length(path: Path) -> Length:
    """Measure one notebook. Raises NotebookImportError when it cannot be read."""
    cells = read_cells(path)
    ends = (i for i, (kind, text) in enumerate(cells) if kind == "markdown" and _END.search(text))
    core = cells[: next(ends, len(cells))]
    texts = [_FOLDED.sub(" ", source) for kind, source in core if kind == "markdown"]
    code = "\n".join(source for kind, source in core if kind == "code")
    exercises = EXERCISE.findall("\n".join(text for kind, text in cells if kind == "markdown"))
    return Length(
        cells=len(core),
        words=sum(len(_NOT_WORDS.sub(" ", text).split()) for text in texts),
        lines=sum(bool(line.strip()) for line in code.splitlines()),
        exercise_minutes=sum(int(minutes) for kind, minutes in exercises if kind == "core"),
    )
