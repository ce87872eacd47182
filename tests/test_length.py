"""The length of a lesson's core path, on a notebook that can be counted by hand."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from playbook_utils.errors import NotebookImportError
from playbook_utils.notebooks.length import length


def write(folder: Path, *cells: nbformat.NotebookNode) -> Path:
    path = folder / "06_tiny.ipynb"
    nbformat.write(new_notebook(cells=list(cells)), path)
    return path


def test_the_core_path_ends_at_going_further_and_leaves_out_what_is_folded(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        new_markdown_cell("# Sum of *two* words\n\n| a | b |\n|---|---|\n"),
        new_markdown_cell("see [lesson 05](05_x.ipynb#a)\n<details>\nnot these\n</details> yes"),
        new_code_cell("a = 1\n\nb = 2\n"),
        new_markdown_cell("### Yours (core, 7 minutes)"),
        new_markdown_cell("## Going further\n\none two three"),
        new_code_cell("c = 3"),
        new_markdown_cell("### Another (more, 20 minutes)"),
        new_markdown_cell("### And one (core, 1 minute)"),
    )
    found = length(path)
    # Sum of two words a b / see lesson 05 yes / Yours (core, 7 minutes)
    assert (found.cells, found.words, found.lines) == (4, 6 + 4 + 4, 2)
    assert found.exercise_minutes == 8
    assert found.minutes == 10


def test_minutes_are_words_lines_and_exercises(tmp_path: Path) -> None:
    words = new_markdown_cell("word " * 2000 + "(core, 12 minutes)")  # 10 + 12 minutes
    code = new_code_cell("x = 1\n" * 250)  # 25 minutes
    assert length(write(tmp_path, words, code)).minutes == 45
    assert length(write(tmp_path)).minutes == 5


def test_what_is_no_notebook_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.ipynb").write_text("{}")
    with pytest.raises(NotebookImportError, match=r"x\.ipynb cannot be read"):
        length(tmp_path / "x.ipynb")
