"""A module of the user's own that changes on disk after it was imported."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from playbook_utils.workers import launch
from playbook_utils.workers.edited import Modules


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Writes the module `own_part`; each time it is newer by ten seconds."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "own_part.py"

    def write(text: str) -> Path:
        path.write_text(text)
        times = path.stat().st_mtime + 10 * text.count("\n")
        os.utime(path, (times, times))
        return path

    yield write
    sys.modules.pop("own_part", None)


def test_a_file_edited_before_and_after_the_first_look_is_named(
    write: Callable[[str], Path],
) -> None:
    path = write("A = 1\n")
    module = importlib.import_module("own_part")
    write("A = 1\nB = 2\n")
    modules = Modules()
    assert modules.edited() == [str(path)]
    importlib.reload(module)
    assert modules.edited() == []
    write("A = 1\nB = 2\nC = 3\n")
    assert modules.edited() == [str(path)]
    path.unlink()
    assert modules.edited() == []


def test_launch_names_it_in_a_warning(write: Callable[[str], Path]) -> None:
    path = write("def value():\n    return 1\n")
    value = importlib.import_module("own_part").value
    assert launch(value, world_size=1) == [1]
    write("\ndef value():\n    return 2\n")
    with pytest.warns(UserWarning, match=f"{path} was edited after this kernel imported it"):
        assert launch(value, world_size=1) == [2]
