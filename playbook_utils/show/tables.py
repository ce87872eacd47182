"""Tables, and lines that hold a formula against a measurement, as plain text of at most 88 columns.

Text only: it reads the same in a notebook, in a terminal and on GitHub, and stored outputs can be
compared.

    show.table([{"rung": "naive", "calls": 55}, {"rung": "buckets", "calls": 4}])
    show.compare("parameters", formula=16_384, measured=16_384, guess=None)
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


_ABSENT: Any = object()
"""Stands for a guess that was not asked for; None is one that the learner has not made."""


def compare(
    name: str,
    formula: float | None = None,
    measured: float | None = None,
    unit: str = "",
    *,
    simulated: float | None = None,
    guess: float | None = _ABSENT,
) -> None:
    """Print `name   your guess 9   formula 16,384   measured 16,384   ratio 1.000` on one line.

    formula: a formula evaluated. simulated: a simulator's answer. measured: what a clock, a counter
    or a tensor said. The ratio is the last of those given over the first of them; one alone has
    none. guess: what the learner typed, None where nothing; shown only where it is passed.

    Raises TypeError for anything but numbers, ValueError where there is nothing to show.
    """
    named = {"formula": formula, "simulated": simulated, "measured": measured}
    given = {what: value for what, value in named.items() if value is not None}
    if not given:
        raise ValueError(f"nothing to compare for {name!r}: pass formula, simulated or measured")
    shown = given if guess is _ABSENT or guess is None else {"guess": guess, **given}
    _expect_numbers(name, **shown)
    parts = [name]
    if guess is not _ABSENT:
        parts.append("your guess " + ("-" if guess is None else _with_unit(guess, unit)))
    parts += [f"{what} {_with_unit(value, unit)}" for what, value in given.items()]
    if len(given) > 1:
        first, *_, last = given
        parts.append(f"ratio {ratio_text(given[first], given[last], first)}")
    print(_GAP.join(parts))


def _with_unit(value: float, unit: str) -> str:
    return f"{number_text(value)} {unit}" if unit else number_text(value)


def _expect_numbers(name: str, **values: float) -> None:
    for what, value in values.items():
        if not is_number(value):
            raise TypeError(
                f"{what} value of {name!r} is {value!r}, a {type(value).__name__}; expected a "
                "number (of a tensor, use `.item()`)"
            )


def comparison(
    rows: Iterable[tuple[str, float, float] | tuple[str, float, float, str]],
    *,
    columns: tuple[str, str] = ("formula", "measured"),
    title: str = "",
) -> Table:
    """A table of (name, first, second) or (name, first, second, unit), with second / first.

    columns: what the two numbers are: ("formula", "measured"), or "simulated" for one of them.
    """
    first, second = columns
    full = [(*row, "") if len(row) == 3 else row for row in rows]
    for name, one, other, _ in full:
        _expect_numbers(name, **{first: one, second: other})
    ratios = [ratio_text(one, other, first) for _, one, other, _ in full]
    width = max(map(len, ratios), default=0)
    heads = ["", first, second, "unit", "ratio"]
    cells = [
        dict(zip(heads, (*row, ratio.rjust(width)), strict=True))
        for row, ratio in zip(full, ratios, strict=True)
    ]
    if not any(unit for *_, unit in full):
        heads.remove("unit")
    return table(cells, columns=heads, title=title)
