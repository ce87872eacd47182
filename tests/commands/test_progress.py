"""`playbook progress`: what a saved lesson says of its exercises, and one put back."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from playbook_utils.commands import main
from playbook_utils.commands.refresh import normalise

STUB = """def {name}(x):
    raise NotImplementedError("write it")


check({name})"""
ANSWER = "def add(x):\n    return x + 1\n\n\ncheck(add)"


def exercise(name: str, source: str, said: str) -> nbformat.NotebookNode:
    cell = new_code_cell(
        source, metadata={"tags": ["exercise"], "stub": STUB.format(name=name)}, execution_count=1
    )
    if said:
        cell.outputs = [new_output("stream", name="stdout", text=said)]
    return cell


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    cells = [
        new_markdown_cell("# Sums"),
        new_markdown_cell("### Add (core, 4 minutes)"),
        exercise("add", ANSWER, "trying\npassed: add\n"),
        new_markdown_cell("### Take (core, 3 minutes)"),
        exercise("take", "def take(x) return", "failed: take\n  found 1\n"),
        new_markdown_cell("### Halve (more, 9 minutes)"),
        exercise("halve", STUB.format(name="halve"), "not solved yet: write it\n"),
    ]
    nbformat.write(new_notebook(cells=cells), tmp_path / "06_sums.ipynb")
    return tmp_path


def test_progress_counts_what_the_checks_said(folder: Path, capsys) -> None:
    assert main(["progress", "--notebooks", str(folder)]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["lesson", "core", "more", "open"]
    assert line.split("  ") == ["06_sums", " 1 of 2", " 0 of 1", "take (failed), halve"]


def test_reset_puts_the_stub_back_and_tells_the_answer(folder: Path, capsys) -> None:
    before = json.loads((folder / "06_sums.ipynb").read_text())
    assert main(["progress", "06", "--reset", "add", "--notebooks", str(folder)]) == 0
    assert ANSWER in capsys.readouterr().out
    after = json.loads((folder / "06_sums.ipynb").read_text())
    cell = after["cells"].pop(2)
    before["cells"].pop(2)
    assert "".join(cell["source"]) == STUB.format(name="add")
    assert (cell["outputs"], cell["execution_count"]) == ([], None)
    assert after["cells"] == before["cells"]
    assert main(["progress", "06", "--notebooks", str(folder)]) == 0
    assert "0 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["06", "--reset", "multiply"], "no exercise 'multiply' in 06_sums.ipynb; there are: add"),
        (["--reset", "add", "06", "07"], "--reset needs one lesson"),
    ],
)
def test_reset_says_what_it_needs(folder: Path, capsys, arguments: list[str], told: str) -> None:
    nbformat.write(new_notebook(cells=[]), folder / "07_more.ipynb")
    assert main(["progress", *arguments, "--notebooks", str(folder)]) == 2
    assert told in capsys.readouterr().err


def test_a_cell_without_its_stub_is_left_alone(folder: Path, capsys) -> None:
    path = folder / "06_sums.ipynb"
    notebook = nbformat.read(path, 4)
    del notebook.cells[2].metadata["stub"]
    nbformat.write(notebook, path)
    before = path.read_bytes()
    assert main(["progress", "06", "--reset", "add", "--notebooks", str(folder)]) == 2
    assert "lost its stub" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_refresh_keeps_the_stub_in_the_cell() -> None:
    stub = new_code_cell(STUB.format(name="add"), metadata={"tags": ["exercise"]})
    solved = new_code_cell(ANSWER, metadata={"tags": ["exercise"], "stub": "as it was"})
    cells = normalise(new_notebook(cells=[stub, solved])).cells
    assert [cell.metadata["stub"] for cell in cells] == [stub.source, "as it was"]
