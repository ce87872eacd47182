"""`playbook export`: the exported cells as they are; other lessons come by the import hook."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from playbook_utils.commands import main
from playbook_utils.commands.export import export_script
from tests.commands.tiny import write_notebook


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "notebooks"
    write_notebook(folder, "06_adding", "#| export\ndef add(a, b):\n    return a + b", "add(1, 2)")
    return folder


def test_export_prints_a_script_of_the_exported_cells(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "06", "--notebooks", str(folder)]) == 0
    script = capsys.readouterr().out
    assert "def add(a, b):" in script
    assert "add(1, 2)" not in script


def test_export_to_a_file_that_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = folder / "adding.py"
    assert main(["export", "adding", "-o", str(script), "--notebooks", str(folder)]) == 0
    assert capsys.readouterr().out == ""
    command = [sys.executable, "-c", "import adding; print(adding.add(2, 3))"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout == "5\n"


BASE = """#| export
from __future__ import annotations
import math

# why half
def half(x: Unknown):
    return math.prod((0.5, x))
"""
TOP = """#| export
import torch
import torch.distributed as dist
from notebooks.base import half as halved
from playbook_utils.workers import launch

def total():
    rank_sum = torch.tensor(halved(dist.get_rank() + 1))
    dist.all_reduce(rank_sum)
    return float(rank_sum)
"""
MAIN = """#| export
from __future__ import annotations

def main(step: Later = 1):
    print(f"totals {launch(total, world_size=2)}\\n", end="")  # whole: ranks share a pipe
"""


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A lesson, and one that imports from it; its title and its cells ask for care."""
    folder = tmp_path / "notebooks"
    write_notebook(folder, "01_base", "print('not exported')", BASE)
    path = write_notebook(folder, "02_top", TOP, "main()", MAIN)
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell('# Say "hi" \\ now'))
    nbformat.write(notebook, path)
    return folder


def test_cells_are_written_as_they_are_and_the_script_says_what_it_is(two: Path) -> None:
    text = export_script("base", two)
    assert "# why half\ndef half(x: Unknown):\n" in text and "not exported" not in text
    said = ast.get_docstring(ast.parse(export_script("top", two))) or ""
    first, *rest = said.split("\n")
    assert first == "Say 'hi' \\ now" and "    torchrun --nproc-per-node 4 this_file.py" in rest


@pytest.mark.parametrize("ranks", [2, 3])
def test_torchrun_runs_the_script_from_the_projects_folder(two: Path, ranks: int) -> None:
    (two.parent / "total.py").write_text(export_script("top", two))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *torchrun, "total.py"]
    done = subprocess.run(command, cwd=two.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"totals {[sum(range(ranks + 1)) / 2] * ranks}" in done.stdout


def test_without_main_the_script_prints_what_it_defines(two: Path) -> None:
    script = two.parent / "base.py"
    script.write_text(export_script("01", two))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.stdout == "Defines: half\n", done.stderr


def test_a_lesson_without_exports_is_refused(two: Path) -> None:
    write_notebook(two, "04_new", "def f(): pass")
    with pytest.raises(ValueError, match=r"04_new\.ipynb exports nothing"):
        export_script("04", two)


def test_unknown_lesson(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "99", "--notebooks", str(folder)]) == 2
    assert "06_adding" in capsys.readouterr().err


def test_a_lesson_that_imports_its_own_answers_does_not_so_in_the_script(folder: Path) -> None:
    cells = (
        "#| export\nfrom notebooks.self import half\n\n\ndef quarter(x):\n    return half(half(x))"
    )
    path = write_notebook(folder, "07_self", cells)
    notebook = nbformat.read(path, 4)
    answer = "<details>\n\n```python\n#| export\ndef half(x):\n    return x / 2\n```\n\n</details>"
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell(answer))
    nbformat.write(notebook, path)
    script = export_script("07", folder)
    assert "notebooks.self" not in script
    names: dict = {}
    exec(script.split("if __name__")[0], names)
    assert names["quarter"](8) == 2
