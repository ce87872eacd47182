"""The budget of a lesson's core path, and the minutes that are stated for it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from playbook_utils.notebooks.length import EXERCISE, LINES_PER_MINUTE, WORDS_PER_MINUTE, length
from tests.notebooks.form import OLD_FORM

ROOT = Path(__file__).resolve().parents[2]
LESSONS = [p for p in sorted((ROOT / "notebooks").glob("*.ipynb")) if p.name[:2] not in OLD_FORM]

# About 60 cells, 2,500 words, 250 lines; a tenth more is still about that.
MOST_CELLS, MOST_WORDS, MOST_LINES = 66, 2750, 275
MOST_MINUTES = 75
FIRST_EXERCISE_MINUTES = 15
"""Reading before the learner first writes something."""


def cells_of(path: Path) -> list[tuple[str, str, list[str]]]:
    """(kind, source, tags) of each cell."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [(c["cell_type"], "".join(c["source"]), c["metadata"].get("tags", [])) for c in cells]


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_core_path_keeps_its_budget(path: Path) -> None:
    found = length(path)
    assert found.cells <= MOST_CELLS
    assert found.words <= MOST_WORDS
    assert found.lines <= MOST_LINES
    assert found.minutes <= MOST_MINUTES


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_stated_minutes_are_the_formulas(path: Path) -> None:
    minutes = length(path).minutes
    title = cells_of(path)[0][1]
    assert f"{minutes} minutes" in title, f"the title cell should say {minutes} minutes"
    (row,) = re.findall(rf"^\| \[{path.stem}\].*$", (ROOT / "README.md").read_text(), re.M)
    assert f"| {minutes} |" in row, f"README should say {minutes} minutes"
    start = (ROOT / "notebooks/00_start_here.ipynb").read_text(encoding="utf-8")
    assert re.search(rf"\b{int(path.name[:2])}: {minutes}\b", start), "and the map of lesson 00"


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_every_exercise_says_core_or_more_and_its_minutes(path: Path) -> None:
    text = ""
    for kind, source, tags in cells_of(path):
        if kind == "markdown":
            text += source
        elif "exercise" in tags:
            assert len(EXERCISE.findall(text)) == 1, f"before {source[:60]!r}"
            text = ""
        assert ("check(" in source and "raise NotImplementedError(" in source) == (
            "exercise" in tags
        ), f"tag exercise: {source[:60]!r}"


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_the_learner_guesses_and_writes(path: Path) -> None:
    cells = cells_of(path)
    guesses = [s for kind, s, _ in cells if kind == "code" and re.search(r"guess\w* = None", s)]
    assert 4 <= len(guesses) <= 6
    first = next(i for i, (_, _, tags) in enumerate(cells) if "exercise" in tags)
    words = sum(len(source.split()) for kind, source, _ in cells[:first] if kind == "markdown")
    lines = sum(len(source.splitlines()) for kind, source, _ in cells[:first] if kind == "code")
    assert words / WORDS_PER_MINUTE + lines / LINES_PER_MINUTE <= FIRST_EXERCISE_MINUTES


def test_only_old_lessons_are_excused() -> None:
    numbers = {path.name[:2] for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert numbers >= OLD_FORM
