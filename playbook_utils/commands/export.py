"""`playbook export`: write a lesson's exported cells as one plain script, for torchrun.

The cells are written as they are. What they import from other lessons is read from those
notebooks when the script runs, so it needs this project as the lessons do.

    playbook export 06
    playbook export 06 -o data_parallelism.py
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

from playbook_utils.commands.lessons import add_folder_option, find_folder, select

__all__ = ["DESCRIPTION", "add_arguments", "export_script", "run"]

DESCRIPTION = "Write the cells marked `#| export` of a lesson as one plain Python script."
_FUTURE = re.compile(r"^from __future__ import .*\n?", re.M)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.add_argument("lesson", metavar="LESSON", help="06, 06_data_parallelism or a path")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: standard output"
    )
    add_folder_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit status."""
    script = export_script(arguments.lesson, arguments.notebooks)
    if arguments.output is None:
        sys.stdout.write(script)
    else:
        arguments.output.write_text(script, encoding="utf-8")
    return 0


def export_script(lesson: str, folder: Path | None = None) -> str:
    """The text of a script with the exported cells of `lesson` ("06", its name or its path).

    Run as a program it calls the exported function `main`; without one it prints what it defines.
    Raises ValueError where there is no such lesson, or it exports nothing; NotebookImportError for
    a cell that does more than define and import.
    """
    from playbook_utils.notebooks.cells import parse_cell, read_notebook

    (path,) = select([lesson], folder or find_folder())
    notebook = read_notebook(path)
    body = [statement for cell in notebook.cells for statement in parse_cell(cell).body]
    kinds = (ast.FunctionDef, ast.ClassDef)
    names = [statement.name for statement in body if isinstance(statement, kinds)]
    if not names:
        raise ValueError(f"{path.name} exports nothing: mark cells with `#| export`")
    title = notebook.title.replace("\\", "\\\\").replace('"', "'")
    # A lesson imports its own folded answers; here they stand above.
    own = re.compile(rf"^from notebooks\.{path.stem[3:]} import .*\n+", re.MULTILINE)
    sources = [own.sub("", cell.source.partition("\n")[2]) for cell in notebook.cells]
    # Python wants these first in a file; in a lesson they hold for the cells below.
    futures = "".join(line for source in sources for line in _FUTURE.findall(source))
    cells = "\n\n\n".join(_FUTURE.sub("", source).strip("\n") for source in sources)
    run = "main()" if "main" in names else f'print("Defines: {", ".join(names)}")'
    return f'''"""{title}

The exported cells of {path.name}: edit the notebook, not this file. What they import from
other lessons is read from the notebooks in or above the working directory, else from beside
playbook_utils. On 4 processes of one machine:

    torchrun --nproc-per-node 4 this_file.py
"""

{futures}
import playbook_utils  # makes `from notebooks.topic import ...` work

{cells}


if __name__ == "__main__":
    {run}
'''
