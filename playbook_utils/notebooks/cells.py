"""The exported cells of a notebook: found, numbered and checked.

A fence of Python in a text cell counts as well, if its first line is the mark: that is how the
lesson's own answer to an exercise lies folded (`<details>`) in JupyterLab, on GitHub and in a
static page alike, and is still what other lessons import.

Only text is handled here; nothing is executed. Plain JSON instead of nbformat, because this runs
whenever a worker imports a notebook.

    notebook = read_notebook(Path("notebooks/06_data_parallelism.ipynb"))
    for cell in notebook.cells:
        tree = parse_cell(cell)
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from playbook_utils.errors import NotebookImportError

__all__ = [
    "ExportedCell", "Notebook", "fences", "find_notebooks", "parse_cell", "read_cells",
    "read_notebook",
]  # fmt: skip

_EXPORT_MARK = re.compile(r"#\s*\|\s*export\s*")
_FENCE = re.compile(r"^```python\n(.*?)\n```\s*$", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"\d+_(\w+)\.ipynb")

_CONSTANT_NODES = (
    *(ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Starred),
    *(ast.Tuple, ast.List, ast.Set, ast.Dict, ast.JoinedStr, ast.FormattedValue),
    *(ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Lambda),
)
_RULE = (
    "An exported cell is run by everything that imports it, so it may only define and import: "
    "import, def, class, docstrings, NAME = constant, if TYPE_CHECKING."
)


@dataclass(frozen=True)
class ExportedCell:
    """One cell marked `#| export`."""

    notebook: str
    """File name of its notebook."""
    number: int
    """Position among the notebook's non-empty code cells, from 1: the [n] of a fresh run."""
    source: str
    fence: int = 0
    """0 for a code cell; n for the n-th exported fence in the text below code cell `number`."""

    @property
    def name(self) -> str:
        """What errors call it: "06_zero.ipynb, cell 12", or "..., answer 1 below cell 12"."""
        answer = f"answer {self.fence} below " if self.fence else ""
        return f"{self.notebook}, {answer}cell {self.number}"

    @property
    def filename(self) -> str:
        """What it is compiled under. In angle brackets, so that nothing looks for it on disk."""
        return f"<{self.name}>"


@dataclass(frozen=True)
class Notebook:
    """What is importable of one notebook file."""

    path: Path
    title: str
    """The first `# ` heading, or the file's name."""
    cells: tuple[ExportedCell, ...]

    @property
    def source(self) -> str:
        """All exported cells, one after the other."""
        return "\n".join(cell.source + "\n" for cell in self.cells)

    @property
    def digest(self) -> str:
        """SHA-256 of the exported source; text, outputs and other cells do not count."""
        return hashlib.sha256(self.source.encode()).hexdigest()


def find_notebooks(folder: Path) -> dict[str, list[Path]]:
    """{module name without "notebooks.": its files}, in reading order.

    Only `NN_topic.ipynb` counts, where topic is a Python name; two numbers for one topic give two
    files.
    """
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.ipynb")):
        if match := _FILE_NAME.fullmatch(path.name):
            found.setdefault(match.group(1), []).append(path)
    return found


def read_cells(path: Path) -> list[tuple[str, str]]:
    """(kind, source) of each cell, "code" or "markdown".

    Raises NotebookImportError when the file cannot be read or is not a notebook.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return [(cell["cell_type"], "".join(cell["source"])) for cell in document["cells"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotebookImportError(
            f"{path.name} cannot be read as a notebook ({type(error).__name__}: {error}). Save it "
            f"again from Jupyter, or restore it with `git checkout`. File: {path}"
        ) from error


def fences(text: str) -> list[str]:
    """The Python code in a text cell: the insides of its ```python fences."""
    return _FENCE.findall(text)


def read_notebook(path: Path) -> Notebook:
    """Read the exported cells of one notebook. Raises NotebookImportError as `read_cells` does."""
    cells = read_cells(path)
    texts = (source for kind, source in cells if kind == "markdown")
    heading = next((m for text in texts if (m := re.search(r"^# +(.+)$", text, re.M))), None)
    exported, number, fence = [], 0, 0
    for kind, source in cells:
        if kind == "code" and source.strip():
            number, fence = number + 1, 0
            if _is_exported(source):
                exported.append(ExportedCell(path.name, number, source))
        for folded in filter(_is_exported, fences(source) if kind == "markdown" else ()):
            fence += 1
            exported.append(ExportedCell(path.name, number, folded, fence))
    title = heading.group(1).strip() if heading else path.stem
    return Notebook(path, title, tuple(exported))


def _is_exported(source: str) -> bool:
    return bool(_EXPORT_MARK.fullmatch(source.split("\n", 1)[0]))


def parse_cell(cell: ExportedCell) -> ast.Module:
    """The cell's syntax tree, once it is known to define and import and do nothing else.

    Raises NotebookImportError naming notebook, cell and line for syntax errors, magics and
    statements that run something.
    """
    try:
        tree = ast.parse(cell.source, cell.filename)
    except SyntaxError as error:
        line_number = error.lineno or 1
        line = _line(cell, line_number)
        if line.lstrip().startswith(("%", "!")):
            raise _refusal(cell, line_number, "a magic or shell command") from None
        raise NotebookImportError(
            f"{cell.name}, line {line_number}: {error.msg}\n    {line.strip()}\n"
            "Correct the cell, run it, and save the notebook."
        ) from error
    _check_statements(cell, tree.body)
    return tree


def _check_statements(cell: ExportedCell, body: Iterable[ast.stmt]) -> None:
    for statement in body:
        test = getattr(statement, "test", None)
        name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
        if isinstance(statement, ast.If) and name == "TYPE_CHECKING":
            _check_statements(cell, [*statement.body, *statement.orelse])
        elif (offender := _offender(statement)) is not None:
            what = "a call" if isinstance(offender, ast.Call) else "a statement that runs"
            raise _refusal(cell, offender.lineno, what)


def _offender(statement: ast.stmt) -> ast.stmt | ast.expr | None:
    """The part of a top-level statement that does more than define and import, if any."""
    definitions = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    if isinstance(statement, ast.ClassDef):
        running = (_offender(part) for part in statement.body if isinstance(part, ast.Expr))
        return next((part for part in running if part is not None), None)
    if isinstance(statement, (*definitions, ast.Pass)) or type(statement).__name__ == "TypeAlias":
        return None
    if isinstance(statement, ast.Expr):
        if isinstance(statement.value, ast.Constant):
            return None
        return statement.value if isinstance(statement.value, ast.Call) else statement
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return statement
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    parts = [part for target in targets for part in ast.walk(target) if isinstance(part, ast.expr)]
    if not all(isinstance(part, (ast.Name, ast.Tuple)) for part in parts):
        return statement
    return None if statement.value is None else _not_constant(statement.value)


def _not_constant(value: ast.expr) -> ast.expr | None:
    if not isinstance(value, _CONSTANT_NODES):
        return value
    # A lambda's body is not run by the import.
    children = [] if isinstance(value, ast.Lambda) else ast.iter_child_nodes(value)
    parts = (_not_constant(child) for child in children if isinstance(child, ast.expr))
    return next((part for part in parts if part is not None), None)


def _refusal(cell: ExportedCell, line_number: int, what: str) -> NotebookImportError:
    return NotebookImportError(
        f"{cell.name}, line {line_number}: {what} in a cell marked `#| export`\n"
        f"    {_line(cell, line_number).strip()}\n{_RULE} Move the line to a cell without the mark."
    )


def _line(cell: ExportedCell, number: int) -> str:
    lines = cell.source.splitlines()
    return lines[number - 1] if number <= len(lines) else ""
