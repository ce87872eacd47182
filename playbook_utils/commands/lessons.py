"""Which notebooks a command means: "06", "06_data_parallelism", a path, or all of them.

Left out: reading them.

    folder = find_folder()
    paths = select(["06"], folder)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

__all__ = ["add_folder_option", "find_folder", "lessons_in", "select"]

_PATTERN = "[0-9][0-9]_*.ipynb"


def add_folder_option(parser: argparse.ArgumentParser) -> None:
    """Add `--notebooks DIR`, for a course that lies elsewhere."""
    parser.add_argument(
        "--notebooks", type=Path, metavar="DIR", help="the folder of the lessons (default: found)"
    )


def find_folder(start: Path | None = None) -> Path:
    """The lessons' folder: `notebooks/` at or above `start`, else beside this package.

    Raises:
        ValueError: No such folder holds a lesson.
    """
    here = (start or Path.cwd()).resolve()
    package_parent = Path(__file__).resolve().parents[2]
    for root in (here, *here.parents, package_parent):
        for folder in (root, root / "notebooks"):
            if folder.name == "notebooks" and lessons_in(folder):
                return folder
    raise ValueError(
        f"no folder notebooks/ with lessons at or above {here}; name it: --notebooks DIR"
    )


def lessons_in(folder: Path) -> list[Path]:
    """The lessons of a folder, in reading order."""
    return sorted(folder.glob(_PATTERN))


def select(selectors: Sequence[str], folder: Path) -> list[Path]:
    """The notebooks that `selectors` name, each once, in the order given; all where none is.

    Args:
        selectors: A lesson's number, its name with or without the number, or a path.
        folder: Where the lessons lie.

    Raises:
        ValueError: A selector names none; the message lists the lessons there are.
    """
    lessons = lessons_in(folder)
    if not selectors:
        if not lessons:
            raise ValueError(f"no lesson ({_PATTERN}) in {folder}")
        return lessons
    return list(dict.fromkeys(_select_one(selector, lessons, folder) for selector in selectors))


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
