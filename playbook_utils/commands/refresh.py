"""`playbook refresh`: execute lessons and store their outputs.

Each lesson runs twice: with the processor's newest instructions and with the oldest that PyTorch
takes. Where it fails, or prints something else the second time, it is not written. What is stored
is the same bytes on every run.

Left out: judging outputs; pictures, of which rounding moves a pixel.

    playbook refresh 06
    playbook refresh --check
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from playbook_utils.commands.execution import execute
from playbook_utils.commands.lessons import find_folder, select
from playbook_utils.commands.run import add_arguments as add_lesson_arguments
from playbook_utils.commands.run import progress_bar, report_failure, stop_on_sigterm

__all__ = [
    "MASKS",
    "OLDEST",
    "add_arguments",
    "as_bytes",
    "difference",
    "mask",
    "normalise",
    "replace",
    "run",
]

DESCRIPTION = (
    "Execute lessons and store their outputs, without what differs from run to run. A lesson that "
    "fails, or prints something else with the processor's newer instructions switched off, is left "
    "as it is, and the exit status is 1."
)

MASKS: dict[str, str] = {
    # In a warning the file of a cell is a temporary one: /tmp/ipykernel_71/2850.py:3: UserWarning
    r"\S*ipykernel_\d+[/\\]\d+\.py": "<cell>",
    r"(?:[A-Za-z]:)?[/\\]\S*[/\\](?:site|dist)-packages[/\\]": "site-packages/",
    r"\b0x[0-9a-f]{6,16}\b": "0x...",
    r"\b(pid|PID)([ =:]+)\d+": r"\1\2...",
    # The end of a tqdm bar: [00:02<00:00, 1.93it/s]
    r"\[\d\d:\d\d(?::\d\d)?<[^\]\n]*\]": "[...]",
}
"""What differs between two runs without meaning anything; `tests/sanitize.cfg` is the same list."""

OLDEST = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "MKL_CBWR": "COMPATIBLE",
}
"""The lowest instruction set of each library in PyTorch that chooses one by the processor."""

MAX_BYTES = 5_000_000
_CELL_METADATA = ("deletable", "editable", "jupyter", "slideshow", "stub", "tags")
_STUB = "raise NotImplementedError("
# JupyterLab draws no saved widget, and GitHub refuses a notebook that stores one without its state.
_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "name": "python"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    add_lesson_arguments(parser)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where a file would change"
    )


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit status."""
    paths = select(arguments.lessons, arguments.notebooks or find_folder())
    reports: dict[str, str] = {}
    with stop_on_sigterm(), progress_bar(paths, runs=2) as bar:
        for path in paths:
            bar.set_description(path.stem)
            reports[path.stem] = _refresh(path, arguments, bar)
    for name, report in reports.items():
        print(f"{name}: {report}")
    bad = ("failed", "would change") if arguments.check else ("failed",)
    return int(any(report.startswith(bad) for report in reports.values()))


def _refresh(path: Path, arguments: argparse.Namespace, bar: Any) -> str:
    """Execute one notebook and write it where it changed; what was done, in a word or two."""
    before = path.read_bytes()
    runs = []
    for environ, where in (({}, ""), (OLDEST, " with the oldest instructions")):
        execution = execute(path, timeout_s=arguments.timeout, on_cell=bar.update, environ=environ)
        if execution.failure is not None:
            bar.write(report_failure(execution.failure), file=sys.stderr)
            return f"failed at cell [{execution.failure.cell}]{where}, not written"
        if path.read_bytes() != before:
            return "failed: it was saved by someone else meanwhile, not written"
        runs.append(normalise(execution.notebook))
    if differs := difference(*runs):
        return f"failed: {differs}, not written"
    new = as_bytes(runs[0])
    if new == before:
        return "unchanged"
    if arguments.check:
        return "would change"
    if len(new) > MAX_BYTES:
        return f"failed: {len(new):,} bytes are too many to store, not written"
    replace(path, new)
    return "written"


def replace(path: Path, content: bytes) -> None:
    """Write all of it or nothing, with the file's own permissions."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".new")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        shutil.copymode(path, name)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def difference(newest: Any, oldest: Any) -> str:
    """Where two normalised runs of a notebook differ first, and how; "" where nowhere.

    As nbval does, it passes over pictures, tracebacks and cells tagged nbval-ignore-output.
    """
    for new, old in zip(newest.cells, oldest.cells, strict=True):
        if new.cell_type != "code" or "nbval-ignore-output" in new.metadata.get("tags", []):
            continue
        for lines in zip_longest(_lines(new), _lines(old), fillvalue=("no more", "")):
            if lines[0] != lines[1]:
                (kind, found), (other_kind, other) = lines
                pairs = enumerate(zip_longest(found, other))
                start = max(0, next((i for i, (a, b) in pairs if a != b), 0) - 30)
                return (
                    f"cell [{new.execution_count}] gives "
                    f"{kind} {found[start:][:80]!r} with the newest instructions and "
                    f"{other_kind} {other[start:][:80]!r} with the oldest (round it, or assert it "
                    "loosely and tag the cell nbval-ignore-output)"
                )
    return ""


def _lines(cell: Any) -> Iterator[tuple[str, str]]:
    """What a cell gave, line by line: (stream or kind of data, line)."""
    for output in cell.outputs:
        if output.output_type == "stream":
            texts = {output.name: output.text}
        elif output.output_type == "error":
            texts = {"error": f"{output.ename}: {output.evalue}"}
        else:
            texts = output.data
        for kind, text in texts.items():
            if kind not in ("image/png", "image/jpeg"):
                text = text if isinstance(text, str) else json.dumps(text)
                yield from ((kind, line) for line in text.splitlines())


def as_bytes(notebook: Any) -> bytes:
    """A notebook as it is stored: one indent, sorted keys, a newline at the end."""
    import nbformat

    text: str = nbformat.writes(notebook)
    return (text.rstrip("\n") + "\n").encode()


def normalise(notebook: Any) -> Any:
    """A copy of an executed notebook without what differs from run to run or machine to machine.

    Kept: sources, cell ids, tags, outputs. Added: an exercise's stub, in its metadata. Dropped:
    widget state and views, timings, the Python version. Masked in texts: `MASKS`. Cells without
    an id get one by their position.
    """
    import nbformat

    clean = nbformat.from_dict(notebook)
    clean.metadata = nbformat.from_dict(_METADATA)
    clean.nbformat, clean.nbformat_minor = 4, 5
    executed = 0
    for position, cell in enumerate(clean.cells):
        cell.setdefault("id", f"cell-{position:03d}")
        cell.metadata = {key: cell.metadata[key] for key in _CELL_METADATA if key in cell.metadata}
        if cell.cell_type != "code":
            continue
        if "exercise" in cell.metadata.get("tags", []) and _STUB in cell.source:
            cell.metadata["stub"] = cell.source  # what `playbook progress --reset` puts back
        executed += bool(cell.source.strip())
        cell.execution_count = executed if cell.source.strip() else None
        cell.outputs = [_normalise_output(o, executed) for o in cell.outputs]
    nbformat.validate(clean)
    return clean


def _normalise_output(output: Any, execution_count: int) -> Any:
    if output.output_type == "stream":
        output.text = mask(output.text)
    elif output.output_type == "error":
        output.evalue = mask(output.evalue)
        output.traceback = [mask(line) for line in output.traceback]
    else:
        output.data = {
            kind: mask(value) if kind.startswith("text/") and isinstance(value, str) else value
            for kind, value in output.data.items()
            if kind != _WIDGET_VIEW
        }
        if output.output_type == "execute_result":
            output.execution_count = execution_count
    return output


def mask(text: str) -> str:
    """`text` with everything in `MASKS` replaced; masking twice changes nothing more."""
    for pattern, replacement in MASKS.items():
        text = re.sub(pattern, replacement, text)
    return text
