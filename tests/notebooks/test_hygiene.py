"""Rules that every stored notebook keeps. Each is a function over a notebook's JSON, tried first on
a tiny notebook that breaks it alone."""

from __future__ import annotations

import copy
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))

MEDIAN_CELL_LINES = 12
P90_CELL_LINES = 30
MAX_CELL_LINES = 50

Notebook = dict[str, Any]
Rule = Callable[[Notebook], list[str]]


def text(value: str | list[str]) -> str:
    """A multi-line string of the notebook format, which may be a list of lines."""
    return value if isinstance(value, str) else "".join(value)


def code_cells(notebook: Notebook) -> list[tuple[int, dict[str, Any]]]:
    return [(i, c) for i, c in enumerate(notebook["cells"]) if c["cell_type"] == "code"]


def outputs(notebook: Notebook) -> list[tuple[int, dict[str, Any]]]:
    return [(i, output) for i, cell in code_cells(notebook) for output in cell["outputs"]]


def output_texts(notebook: Notebook) -> list[tuple[int, str]]:
    """Every text of every output, images left out."""
    found = []
    for position, output in outputs(notebook):
        found += [(position, text(output[k])) for k in ("text", "evalue") if k in output]
        found += [(position, text(line)) for line in output.get("traceback", [])]
        for kind, value in output.get("data", {}).items():
            if kind.startswith("text/"):
                found.append((position, text(value)))
    return found


def tags(cell: dict[str, Any]) -> list[str]:
    found: list[str] = cell["metadata"].get("tags", [])
    return found


def never_executed(notebook: Notebook) -> list[str]:
    """nbval runs a cell without an execution count, but compares nothing."""
    counts = [(i, c["execution_count"], text(c["source"]).strip()) for i, c in code_cells(notebook)]
    return [f"cell {i} was never executed" for i, count, source in counts if source and not count]


def empty_cell(notebook: Notebook) -> list[str]:
    return [
        f"cell {i} is empty"
        for i, cell in enumerate(notebook["cells"])
        if not text(cell["source"]).strip()
    ]


def counts_out_of_order(notebook: Notebook) -> list[str]:
    counts = [c["execution_count"] for _, c in code_cells(notebook) if c["execution_count"]]
    if counts == list(range(1, len(counts) + 1)):
        return []
    return [f"execution counts are {counts}: run from the top with `make refresh`"]


def stored_error(notebook: Notebook) -> list[str]:
    return [
        f"cell {i} stores an error but has no tag raises-exception"
        for i, cell in code_cells(notebook)
        if any(o["output_type"] == "error" for o in cell["outputs"])
        and "raises-exception" not in tags(cell)
    ]


def skipped_cell(notebook: Notebook) -> list[str]:
    found = []
    for i, cell in code_cells(notebook):
        marked = re.search(r"#\s*NBVAL_\w+", text(cell["source"]))
        if marked or any("skip" in tag for tag in tags(cell)):
            found.append(f"cell {i} is kept from running or from comparison: tag it, or drop it")
    return found


def widget_state_unusable(notebook: Notebook) -> list[str]:
    """GitHub refuses to draw a notebook whose widget metadata lacks `state`."""
    for kind, value in notebook["metadata"].get("widgets", {}).items():
        if "state" not in value:
            return [f"metadata.widgets[{kind!r}] has no key 'state'"]
    return []


def cells_too_long(notebook: Notebook) -> list[str]:
    lengths = {i: len(text(c["source"]).splitlines()) for i, c in code_cells(notebook)}
    if not lengths:
        return []
    found = [f"cell {i} has {n} lines" for i, n in lengths.items() if n > MAX_CELL_LINES]
    median = statistics.median(lengths.values())
    if median > MEDIAN_CELL_LINES:
        found.append(f"the median code cell has {median:g} lines, more than {MEDIAN_CELL_LINES}")
    p90 = sorted(lengths.values())[int(0.9 * (len(lengths) - 1))]
    if p90 > P90_CELL_LINES:
        found.append(f"a tenth of the code cells have {p90} lines or more, over {P90_CELL_LINES}")
    return found


def base64_in_source(notebook: Notebook) -> list[str]:
    pattern = re.compile(r"base64,|[A-Za-z0-9+/]{200,}")
    found = []
    for i, cell in enumerate(notebook["cells"]):
        if pattern.search(text(cell["source"])) or cell.get("attachments"):
            found.append(f"cell {i} holds an image or other data in its source")
    return found


def wrong_kernel(notebook: Notebook) -> list[str]:
    name = notebook["metadata"].get("kernelspec", {}).get("name")
    return [] if name == "python3" else [f"the kernelspec is {name!r}, not 'python3'"]


def absolute_path(notebook: Notebook) -> list[str]:
    """A path of the author's machine; system files that a lesson explains are allowed."""
    pattern = re.compile(
        r"(?<![\w.:/<-])(?:~|/(?!dev/|proc/|sys/|etc/)[\w.+-]+)(?:/[\w.+-]+)+|\b[A-Z]:\\\w"
    )
    found = []
    for position, output in output_texts(notebook):
        for match in pattern.finditer(re.sub(r"<[^>]*>", " ", output)):
            found.append(f"cell {position} shows the path {match.group()!r}")
    return found


def unstable_text(notebook: Notebook) -> list[str]:
    """What `playbook refresh` masks: an address, a process id, a kernel's file."""
    from playbook_utils.commands.refresh import mask

    return [
        f"cell {position} stores what changes on every run: use `make refresh`"
        for position, output in output_texts(notebook)
        if mask(output) != output
    ]


def strange_ids(notebook: Notebook) -> list[str]:
    ids = [cell.get("id") for cell in notebook["cells"]]
    found = [f"cell {i} has no id" for i, name in enumerate(ids) if not name]
    found += [
        f"the id {name!r} is used twice" for name in {n for n in ids if n and ids.count(n) > 1}
    ]
    return found


RULES: list[Rule] = [
    never_executed,
    empty_cell,
    counts_out_of_order,
    stored_error,
    skipped_cell,
    widget_state_unusable,
    cells_too_long,
    base64_in_source,
    wrong_kernel,
    absolute_path,
    unstable_text,
    strange_ids,
]


def code(name: str, source: str, count: int | None, *stored: dict[str, Any]) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "id": name,
        "metadata": {},
        "source": source.splitlines(keepends=True),
        "execution_count": count,
        "outputs": list(stored),
    }


def printed(value: str) -> dict[str, Any]:
    return {"output_type": "stream", "name": "stdout", "text": [value]}


def good_notebook() -> Notebook:
    error = {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": ["no"]}
    raises = code("raises", "raise ValueError('no')", 2, error)
    raises["metadata"]["tags"] = ["raises-exception"]
    return {
        "cells": [
            {"cell_type": "markdown", "id": "title", "metadata": {}, "source": ["# Title\n"]},
            code(
                "shapes", "print(2/3)", 1, printed("2/3 of it, 1.5 GiB/s, grads/params, and/or\n")
            ),
            raises,
        ],
        "metadata": {"kernelspec": {"name": "python3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _set(notebook: Notebook, position: int, **values: Any) -> None:
    notebook["cells"][position].update(values)


BREAKAGES: dict[str, tuple[Rule, Callable[[Notebook], Any]]] = {
    "null count": (never_executed, lambda n: _set(n, 2, execution_count=None)),
    "empty cell": (empty_cell, lambda n: _set(n, 0, source=[" \n"])),
    "counts 1, 3": (counts_out_of_order, lambda n: _set(n, 2, execution_count=3)),
    "counts 2, 1": (
        counts_out_of_order,
        lambda n: (_set(n, 1, execution_count=2), _set(n, 2, execution_count=1)),
    ),
    "error without tag": (stored_error, lambda n: _set(n, 2, metadata={})),
    "nbval-skip": (skipped_cell, lambda n: _set(n, 1, metadata={"tags": ["nbval-skip"]})),
    "nbval comment": (skipped_cell, lambda n: _set(n, 1, source=["# NBVAL_IGNORE_OUTPUT\n1"])),
    "widgets without state": (
        widget_state_unusable,
        lambda n: n["metadata"].update(widgets={"application/vnd.jupyter.widget-state+json": {}}),
    ),
    "51 lines": (cells_too_long, lambda n: n["cells"].append(code("long", "1\n" * 51, 3))),
    "median 13": (
        cells_too_long,
        lambda n: (_set(n, 1, source=["1\n"] * 13), _set(n, 2, source=["1\n"] * 13)),
    ),
    "p90 31": (
        cells_too_long,
        lambda n: n["cells"].extend(
            [code(f"a{i}", "1", 3 + i) for i in range(6)]
            + [code(f"b{i}", "1\n" * 31, 9 + i) for i in range(2)]
        ),
    ),
    "data URI": (
        base64_in_source,
        lambda n: _set(n, 0, source=["![](data:image/png;base64,iVBORw0KGgo=)"]),
    ),
    "attachment": (
        base64_in_source,
        lambda n: _set(n, 0, attachments={"a.png": {"image/png": "iVBORw0KGgo="}}),
    ),
    "kernel": (wrong_kernel, lambda n: n["metadata"].update(kernelspec={"name": "venv"})),
    "home path": (absolute_path, lambda n: _set(n, 1, outputs=[printed("in /home/me/x.py")])),
    "tilde path": (absolute_path, lambda n: _set(n, 1, outputs=[printed("File ~/course/x.py:3")])),
    "windows path": (absolute_path, lambda n: _set(n, 1, outputs=[printed("in C:\\Users\\me")])),
    "address": (unstable_text, lambda n: _set(n, 1, outputs=[printed("<f at 0x7f00aabbccdd>")])),
    "pid": (unstable_text, lambda n: _set(n, 1, outputs=[printed("worker pid 4711")])),
    "same id": (strange_ids, lambda n: _set(n, 1, id="title")),
    "no id": (strange_ids, lambda n: n["cells"][1].pop("id")),
}


def test_good_notebook_breaks_no_rule() -> None:
    assert {rule.__name__: rule(good_notebook()) for rule in RULES} == {
        r.__name__: [] for r in RULES
    }


@pytest.mark.parametrize("name", BREAKAGES)
def test_each_breakage_is_seen_by_its_rule_alone(name: str) -> None:
    rule, break_it = BREAKAGES[name]
    notebook = copy.deepcopy(good_notebook())
    break_it(notebook)
    assert [r.__name__ for r in RULES if r(notebook)] == [rule.__name__]


def test_every_rule_has_a_breakage() -> None:
    assert {rule for rule, _ in BREAKAGES.values()} == set(RULES)


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_lesson(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert [problem for rule in RULES for problem in rule(notebook)] == []
