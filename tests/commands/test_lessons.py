from __future__ import annotations

from pathlib import Path

import pytest

from playbook_utils.commands import main
from playbook_utils.commands.lessons import find_folder, select


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "notebooks"
    folder.mkdir()
    for name in (
        "06_data_parallelism.ipynb",
        "00_start_here.ipynb",
        "16_zero.ipynb",
        "scratch.ipynb",
    ):
        (folder / name).write_text("{}")
    return folder


def names(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


@pytest.mark.parametrize("selector", ["06", "6", "06_data_parallelism", "data_parallelism"])
def test_one_lesson_by_each_of_its_names(folder: Path, selector: str) -> None:
    assert names(select([selector], folder)) == ["06_data_parallelism"]


def test_all_lessons_in_reading_order_where_none_is_named(folder: Path) -> None:
    assert names(select([], folder)) == ["00_start_here", "06_data_parallelism", "16_zero"]


def test_order_given_is_kept_and_doubles_are_not(folder: Path) -> None:
    assert names(select(["16", "00", "zero"], folder)) == ["16_zero", "00_start_here"]


def test_a_path_need_not_be_a_lesson(folder: Path) -> None:
    path = folder / "scratch.ipynb"
    assert select([str(path)], folder) == [path]


@pytest.mark.parametrize("selector", ["7", "66", "scratch", "nowhere.ipynb", ""])
def test_unknown_lesson_lists_those_there_are(folder: Path, selector: str) -> None:
    with pytest.raises(ValueError, match="00_start_here, 06_data_parallelism, 16_zero"):
        select([selector], folder)


def test_no_lessons(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no lesson"):
        select([], tmp_path)


def test_folder_is_found_from_below_and_from_inside(folder: Path) -> None:
    below = folder.parent / "a" / "b"
    below.mkdir(parents=True)
    assert find_folder(below) == find_folder(folder) == find_folder(folder.parent) == folder
    assert len(select([], folder)) == 3


def test_command_line_reports_an_unknown_lesson(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "42", "--notebooks", str(folder)]) == 2
    printed = capsys.readouterr()
    assert "no lesson '42'" in printed.err
    assert "06_data_parallelism" in printed.err
    assert printed.out == ""
