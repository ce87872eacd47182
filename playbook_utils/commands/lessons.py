"""Which notebooks a command means: "06", "06_data_parallelism", a path, or all of them.

Left out: reading them.

    folder = find_folder()
    paths = select(["06"], folder)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from playbook_utils import notebooks

__all__ = ["add_folder_option", "find_folder", "select"]

_PATTERN = "[0-9][0-9]_*.ipynb"


def add_folder_option(parser: argparse.ArgumentParser) -> None:
    """Add `--notebooks DIR`, for a course that lies elsewhere."""
    parser.add_argument(
        "--notebooks", type=Path, metavar="DIR", help="the folder of the lessons (default: found)"
    )


def find_folder(start: Path | None = None) -> Path:
    """The lessons' folder, found as the import of notebooks finds it; ValueError without one."""
    here = (start or Path.cwd()).resolve()
    if folder := notebooks.find_folder(here):
        return folder
    raise ValueError(f"no folder with lessons at or above {here}; name it: --notebooks DIR")


def select(selectors: Sequence[str], folder: Path) -> list[Path]:
    """The notebooks that `selectors` name, each once, in the order given; without any, all.

    A selector is a lesson's number, its name with or without the number, or a path. Raises
    ValueError for one that names none, with the lessons there are.
    """
    lessons = sorted(folder.glob(_PATTERN))
    if not lessons and not selectors:
        raise ValueError(f"no lesson ({_PATTERN}) in {folder}")
    found = [_select_one(selector, lessons, folder) for selector in selectors]
    return list(dict.fromkeys(found)) if selectors else lessons


def _select_one(selector: str, lessons: list[Path], folder: Path) -> Path:
    for lesson in lessons:
        number, name = lesson.stem.split("_", maxsplit=1)
        if selector in (lesson.stem, name) or (
            selector.isdecimal() and int(selector) == int(number)
        ):
            return lesson
    path = Path(selector)
    if path.suffix == ".ipynb" and path.is_file():
        return path
    known = ", ".join(lesson.stem for lesson in lessons) or "none"
    raise ValueError(f"no lesson {selector!r} in {folder}; there are: {known}")
