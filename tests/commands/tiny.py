"""Tiny notebooks for the tests of the commands; no torch, so a kernel starts in about a second."""

from __future__ import annotations

from pathlib import Path

import nbformat

__all__ = ["write_notebook"]


def write_notebook(folder: Path, name: str, *sources: str) -> Path:
    """Write a notebook with these code cells, never executed."""
    folder.mkdir(parents=True, exist_ok=True)
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    for position, cell in enumerate(cells):
        cell["id"] = f"c{position:02d}"
    path = folder / f"{name}.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), str(path))
    return path
