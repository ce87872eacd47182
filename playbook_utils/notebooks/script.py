"""A notebook's exported cells as one plain script, which torchrun can run on a cluster.

The script needs `playbook_utils` and no notebook: what the cells import from other notebooks is
written into it, just the definitions that are used, in the order in which they depend on each
other. Functions find their globals by name, so a script can hold only one definition of a name;
two are an error.

    text = export_script("06")      # or "data_parallelism", or the notebook's path
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from playbook_utils.notebooks.cells import (
    Notebook,
    bound_names,
    find_notebooks,
    parse_cell,
    read_notebook,
)
from playbook_utils.notebooks.finder import notebook_folder

__all__ = ["export_script"]


@dataclass
class _Statement:
    """One top-level statement with the comments above it."""

    node: ast.stmt
    text: str
    first_line: int
    """The cell's line with which `text` starts."""
    where: str
    used: set[str] = field(default_factory=set)


def export_script(notebook: str | Path, *, main: str | None = None) -> str:
    """The text of a script with the exported cells of `notebook`.

    notebook: its number ("06"), its topic ("data_parallelism"), or its path.
    main: the exported function that the script calls, without arguments. Default: `main` where the
    notebook exports one; otherwise the script prints what it defines.

    Raises ValueError for an unknown notebook or `main`, where two definitions share a name, and
    for forms of import that cannot be written into a script; NotebookImportError for a bad cell.
    """
    path = _locate(notebook)
    source = read_notebook(path)
    functions = [
        node.name
        for cell in source.cells
        for node in parse_cell(cell).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    ]
    if not functions:
        raise ValueError(f"{path.name} exports nothing: mark cells with `#| export`")
    if main is not None and main not in functions:
        raise ValueError(f"{path.name} exports no {main!r}; it exports: {', '.join(functions)}")
    writer = _Writer(path.parent)
    writer.add(source, None)
    call = main or ("main" if "main" in functions else None)
    last = f"{call}()" if call else f'print("Defines: {", ".join(functions)}")'
    future = f"from __future__ import {', '.join(writer.futures)}\n\n" if writer.futures else ""
    body = "\n\n".join(writer.parts)
    return f'{_header(source)}\n{future}{body}\n\nif __name__ == "__main__":\n    {last}\n'


def _header(notebook: Notebook) -> str:
    title = notebook.title.replace("\\", "\\\\").replace('"""', "'''").rstrip('"')
    topic = notebook.path.stem.split("_", 1)[-1]
    return (
        f'"""{title}\n\nThe exported cells of {notebook.path.name}: edit the notebook, not this '
        "file.\nNeeds the package playbook_utils. On 4 processes of one machine:\n\n"
        f'    torchrun --nproc-per-node 4 {topic}.py\n"""\n'
    )


def _locate(notebook: str | Path) -> Path:
    path = Path(notebook)
    if path.suffix == ".ipynb" and path.exists():
        return path.resolve()
    folder = notebook_folder()
    there = [file for files in find_notebooks(folder).values() for file in files] if folder else []
    stem = path.stem
    matches = [
        file
        for file in there
        if stem == file.stem
        or stem == file.stem.split("_", 1)[1]
        or (stem.isdigit() and int(stem) == int(file.stem.split("_", 1)[0]))
    ]
    if len(matches) != 1:
        names = ", ".join(file.name for file in there) or "none"
        raise ValueError(f"no single notebook is called {str(notebook)!r}; there are: {names}")
    return matches[0]


class _Writer:
    """Collects the statements of a notebook and of those that it imports from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts: list[str] = []
        self.futures: list[str] = []
        self._owners: dict[str, tuple[str, str]] = {}
        """{name in the script: (where it comes from, how errors name that place)}."""
        self._written: dict[str, set[int]] = {}
        self._visiting: list[str] = []

    def add(self, notebook: Notebook, wanted: set[str] | None) -> None:
        """Write the statements that define `wanted` and all that they use; None: everything."""
        name = notebook.path.name
        if name in self._visiting:
            circle = " -> ".join([*self._visiting, name])
            raise ValueError(f"{circle} import each other in a circle")
        self._visiting.append(name)
        statements = list(_statements(notebook))
        kept = _needed(statements, wanted)
        written = self._written.setdefault(name, set())
        chunks: list[str] = []
        for index, statement in enumerate(statements):
            if index in kept - written:
                chunks.append(self._write(statement))
        written |= kept
        text = "\n".join(chunk for chunk in chunks if chunk.strip())
        if text:
            self.parts.append(f"# From {name}\n\n{text.strip()}\n")
        self._visiting.pop()

    def _write(self, statement: _Statement) -> str:
        node = statement.node
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            names = [alias.name for alias in node.names]
            self.futures += [name for name in names if name not in self.futures]
            return ""
        text = statement.text
        # From the last to the first, so that the positions of those above stay right.
        inner = sorted(_notebook_imports(statement), key=lambda found: -found.lineno)
        for found in inner:
            aliases = self._inline(found, statement)
            text = _replace(text, found, statement.first_line, aliases, top=found is node)
        own = set(bound_names([node])) if not (inner and inner[-1] is node) else set()
        for name in own:
            self._claim(name, _origin(node, name, statement.where), statement.where)
        return text

    def _inline(self, found: ast.ImportFrom, statement: _Statement) -> list[str]:
        """Write what is imported; return the assignments that rename it."""
        if any(alias.name == "*" for alias in found.names):
            raise ValueError(f"{statement.where}: name what you import instead of `*`")
        topic = (found.module or "").partition(".")[2]
        files = find_notebooks(self.folder).get(topic, [])
        if len(files) != 1:
            raise ValueError(f"{statement.where}: there is no notebook NN_{topic}.ipynb to inline")
        source = read_notebook(files[0])
        defined = {name for part in _statements(source) for name in bound_names([part.node])}
        wanted = {alias.name for alias in found.names}
        if missing := sorted(wanted - defined):
            raise ValueError(f"{statement.where}: {files[0].name} exports no {', '.join(missing)}")
        self.add(source, wanted)
        renamed = [alias for alias in found.names if alias.asname not in (None, alias.name)]
        for alias in renamed:
            assert alias.asname is not None
            self._claim(alias.asname, f"{files[0].name}:{alias.name}", statement.where)
        return [f"{alias.asname} = {alias.name}" for alias in renamed]

    def _claim(self, name: str, origin: str, where: str) -> None:
        owner = self._owners.setdefault(name, (origin, where))
        if owner[0] != origin:
            raise ValueError(
                f"{name!r} is defined in {owner[1]} and, differently, in {where}. One script can "
                "hold one of them: rename the other."
            )


def _statements(notebook: Notebook) -> Iterator[_Statement]:
    for cell in notebook.cells:
        lines = cell.source.split("\n")
        body = parse_cell(cell).body
        written = 1  # the export mark
        for position, node in enumerate(body):
            end = node.end_lineno or node.lineno
            following = body[position + 1] if position + 1 < len(body) else None
            if following is not None and _first_line(following) <= end:
                raise ValueError(f"{cell.name}, line {end}: put one statement on a line")
            if any(isinstance(part, ast.Import) and _of_notebooks(part) for part in ast.walk(node)):
                raise ValueError(f"{cell.name}: write `from notebooks.topic import Name` instead")
            text = "\n".join(lines[written : end if following is not None else None])
            used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            yield _Statement(node, text, written + 1, cell.name, used)
            written = end


def _of_notebooks(node: ast.Import) -> bool:
    return any(alias.name.split(".")[0] == "notebooks" for alias in node.names)


def _needed(statements: list[_Statement], wanted: set[str] | None) -> set[int]:
    """Indices of the statements that define `wanted`, and what those use, and so on."""
    if wanted is None:
        return set(range(len(statements)))
    kept = {i for i, part in enumerate(statements) if _is_future(part.node)}
    names = set(wanted)
    while True:
        new = {
            i
            for i, part in enumerate(statements)
            if i not in kept and names & set(bound_names([part.node]))
        }
        if not new:
            return kept
        kept |= new
        names |= set().union(*(statements[i].used for i in new))


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _notebook_imports(statement: _Statement) -> list[ast.ImportFrom]:
    found = [part for part in ast.walk(statement.node) if isinstance(part, ast.ImportFrom)]
    if any(part.module == "notebooks" for part in found):
        raise ValueError(f"{statement.where}: write `from notebooks.topic import Name` instead")
    return [part for part in found if (part.module or "").startswith("notebooks.")]


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _replace(text: str, found: ast.ImportFrom, first: int, aliases: list[str], top: bool) -> str:
    """`text`, whose first line is line `first` of the cell, with an import replaced."""
    lines = [line.encode() for line in text.split("\n")]
    start, end = found.lineno - first, (found.end_lineno or found.lineno) - first
    before, after = lines[start][: found.col_offset], lines[end][found.end_col_offset :]
    names = ", ".join(alias.name for alias in found.names)
    new = "; ".join(aliases) or ("" if top else f"pass  # {names}: above")
    if top and after.lstrip().startswith(b"#") and not aliases:
        after = after.lstrip()
    elif after.strip():
        new = "; ".join(aliases) or "pass"
    lines[start : end + 1] = [before + new.encode() + after]
    return "\n".join(line.decode() for line in lines)


def _origin(node: ast.stmt, name: str, where: str) -> str:
    """What makes two bindings of a name the same: one notebook, or one import."""
    if isinstance(node, ast.ImportFrom):
        alias = next(alias for alias in node.names if (alias.asname or alias.name) == name)
        return f"{node.module}:{alias.name}"
    if isinstance(node, ast.Import):
        alias = next(a for a in node.names if (a.asname or a.name.split(".")[0]) == name)
        return alias.name if alias.asname else name
    return f"{where.split(',')[0]}:{name}"
