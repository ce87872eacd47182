"""`playbook export`: a lesson's exported cells as one plain script, for torchrun on a cluster.

Left out: the reading of cells (`playbook_utils.notebooks`).

    playbook export 06
    playbook export 06 -o data_parallelism.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from playbook_utils.commands.lessons import add_folder_option, find_folder, select

__all__ = ["add_parser"]


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's parser."""
    parser = subcommands.add_parser(
        "export",
        help="write a lesson's exported cells as one script",
        description="Write the cells marked `#| export` of a lesson as one plain Python script.",
    )
    parser.add_argument("lesson", metavar="LESSON", help="06, 06_data_parallelism or a path")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: standard output"
    )
    add_folder_option(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from playbook_utils.notebooks import export_script

    (notebook,) = select([arguments.lesson], arguments.notebooks or find_folder())
    script = export_script(notebook)
    if arguments.output is None:
        sys.stdout.write(script)
    else:
        arguments.output.write_text(script, encoding="utf-8")
    return 0
