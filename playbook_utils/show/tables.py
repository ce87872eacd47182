"""Tables and predicted-against-measured lines, as plain text of at most 88 columns.

Text only: it reads the same in a notebook, in a terminal and on GitHub, and stored outputs can be
compared.

    show.table([{"rung": "naive", "calls": 55}, {"rung": "buckets", "calls": 4}])
    show.compare("parameters", predicted=16_384, measured=16_384)
    show.comparison([("all_reduce bytes", 393_216, 393_216), ("calls", 4, 4)])
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from playbook_utils.show.units import is_number, number_text, ratio_text

__all__ = ["TABLE_COLUMNS", "Table", "compare", "comparison", "table"]

TABLE_COLUMNS = 88
"""Widest a table gets, in characters: the width of a notebook's cell."""

_GAP = "   "
_NARROWEST_TEXT = 12


class Table:
    """Aligned text; printing it and ending a cell with it show the same."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def table(
    rows: Iterable[Mapping[str, Any] | Sequence[Any]],
    *,
    columns: Sequence[str] | None = None,
    title: str = "",
) -> Table:
    """A table of dicts (columns: their keys, or those named) or of tuples (`columns` required).

    Integers get thousands separators, floats four digits, None and missing keys a dash. Text that
    would make the table wider than 88 characters is wrapped inside its column.

    Raises ValueError without rows or columns, for tuples of another length, and for a table that
    does not fit however its text is wrapped.
    """
    rows = list(rows)
    if not rows:
        raise ValueError("no rows: a table needs at least one")
    heads = list(columns) if columns is not None else _keys(rows)
    body = [_cells(row, heads, number) for number, row in enumerate(rows)]
    numeric = [all(is_number(row[i]) or row[i] is None for row in body) for i in range(len(heads))]
    texts = [[_text(value) for value in row] for row in body]
    widths = _widths(heads, texts, numeric)
    rule = "-" * (sum(widths) + len(_GAP) * (len(widths) - 1))
    lines = [*([title] if title else []), *_row_lines(heads, widths, numeric), rule]
    lines += [line for row in texts for line in _row_lines(row, widths, numeric)]
    return Table("\n".join(lines))


def _keys(rows: Sequence[Any]) -> list[str]:
    if not all(isinstance(row, Mapping) for row in rows):
        raise ValueError("rows that are not dicts need `columns`, the names of their values")
    heads = list(dict.fromkeys(str(key) for row in rows for key in row))
    if not heads:
        raise ValueError("no columns: the rows are empty")
    return heads


def _cells(row: Any, heads: list[str], number: int) -> list[Any]:
    if isinstance(row, Mapping):
        return [row.get(head) for head in heads]
    values = list(row)
    if len(values) != len(heads):
        raise ValueError(
            f"row {number} has {len(values)} values for {len(heads)} columns ({', '.join(heads)}): "
            f"{values}"
        )
    return values


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number_text(value) if is_number(value) else str(value)


def _widths(heads: list[str], texts: list[list[str]], numeric: list[bool]) -> list[int]:
    """Widths of the columns; the widest column of text gives way until the table fits."""
    widths = [
        max(len(line) for row in [heads, *texts] for line in row[i].split("\n"))
        for i in range(len(heads))
    ]
    room = TABLE_COLUMNS - len(_GAP) * (len(heads) - 1)
    while sum(widths) > room:
        wide = [i for i, width in enumerate(widths) if width > _NARROWEST_TEXT]
        shrinkable = [i for i in wide if not numeric[i]]
        if not shrinkable:
            raise ValueError(
                f"the table is {sum(widths) + TABLE_COLUMNS - room} characters wide, and at most "
                f"{TABLE_COLUMNS} fit: drop a column or shorten a name. Columns: {', '.join(heads)}"
            )
        widths[max(shrinkable, key=lambda i: widths[i])] -= 1
    return widths


def _row_lines(row: list[str], widths: list[int], numeric: list[bool]) -> list[str]:
    wrapped = [
        [part for line in text.split("\n") for part in textwrap.wrap(line, width) or [""]]
        for text, width in zip(row, widths, strict=True)
    ]
    lines = []
    for parts in zip_longest(*wrapped, fillvalue=""):
        columns = zip(parts, widths, numeric, strict=True)
        padded = [f"{part:{'>' if right else '<'}{width}}" for part, width, right in columns]
        lines.append(_GAP.join(padded).rstrip())
    return lines


def compare(name: str, predicted: float, measured: float, unit: str = "") -> None:
    """Print `name   predicted 16,384   measured 16,384   ratio 1.000`: measured / predicted.

    The unit stands after each number. Raises TypeError for anything but numbers.
    """
    _expect_numbers(name, predicted, measured)
    after = f" {unit}" if unit else ""
    print(
        f"{name}{_GAP}predicted {number_text(predicted)}{after}{_GAP}"
        f"measured {number_text(measured)}{after}{_GAP}ratio {ratio_text(predicted, measured)}"
    )


def _expect_numbers(name: str, predicted: float, measured: float) -> None:
    for what, value in (("predicted", predicted), ("measured", measured)):
        if not is_number(value):
            raise TypeError(
                f"{what} value of {name!r} is {value!r}, a {type(value).__name__}; expected a "
                "number (of a tensor, use `.item()`)"
            )


def comparison(
    rows: Iterable[tuple[str, float, float] | tuple[str, float, float, str]], *, title: str = ""
) -> Table:
    """A table of (name, predicted, measured) or (name, predicted, measured, unit), with ratios."""
    full = [(*row, "") if len(row) == 3 else row for row in rows]
    for name, predicted, measured, _ in full:
        _expect_numbers(name, predicted, measured)
    ratios = [ratio_text(predicted, measured) for _, predicted, measured, _ in full]
    width = max(map(len, ratios), default=0)
    heads = ["", "predicted", "measured", "unit", "ratio"]
    cells = [
        dict(zip(heads, (*row, ratio.rjust(width)), strict=True))
        for row, ratio in zip(full, ratios, strict=True)
    ]
    if not any(unit for *_, unit in full):
        heads.remove("unit")
    return table(cells, columns=heads, title=title)
