"""The `playbook` command: one module a subcommand, none of which the rest of the package imports.

A module's first line is the subcommand's help; it has a DESCRIPTION, `add_arguments` and `run`.

Left out: anything worth calling from a lesson; that lives in the package proper.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from playbook_utils.commands import doctor, export, memory, progress, refresh, run
from playbook_utils.errors import PlaybookError

__all__ = ["main"]

_INTERRUPTED = 130
_READER_GONE = 141  # what a shell reports of a program that SIGPIPE (13) ended: 128 + 13


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand, by default with the arguments of the process.

    Returns the exit status: 0 for success, 1 where what was asked for failed, 2 for bad arguments
    and where the answer cannot be written (a full disk), 130 when interrupted, 141 where nobody
    reads the answer to its end (`playbook memory ... | head -1`).
    """
    # Else jsonschema, under nbformat, builds a grammar of URLs as it is imported, for seconds.
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    parser = argparse.ArgumentParser(
        prog="playbook",
        description="The Ultra-Scale Playbook's notebooks: check, run, store, export; "
        "and what its formulas predict.",
    )
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (doctor, run, progress, refresh, export, memory):
        name, _, about = str(module.__doc__).splitlines()[0].partition("`: ")
        command = subcommands.add_parser(
            name.split()[-1], help=about.rstrip("."), description=module.DESCRIPTION
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()  # here, where a failure still has an exit status of its own
    except (ValueError, PlaybookError) as error:
        print(f"playbook {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"playbook {arguments.command}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except OSError as error:
        try:
            sys.stdout.flush()
        except OSError:  # send it nowhere: Python would fail again on it as it exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return _READER_GONE
        print(f"playbook {arguments.command}: {error}", file=sys.stderr)
        return 2
    return status
