from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from playbook_utils.commands import main
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


def test_unknown_lesson(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "99", "--notebooks", str(folder)]) == 2
    assert "06_adding" in capsys.readouterr().err
