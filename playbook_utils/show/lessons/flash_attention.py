"""Lesson 20: attention scores cut into tiles: computed, masked, skipped, and the one in hand.

    show.attention_tiles([["masked", "skipped"], ["full", "masked"]], current=(1, 0))

Rows are blocks of queries, columns blocks of keys and values. Left out: what is inside a tile, and
which of the tiles are worked on at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from playbook_utils.show.canvas import Canvas
from playbook_utils.show.style import Picture, color_of

__all__ = ["attention_tiles"]

_COLORS = {"full": color_of("compute"), "masked": "#8CC5BE", "skipped": color_of("idle")}
_SAID = {"full": "computed", "masked": "computed and masked", "skipped": "skipped"}
_IN_HAND, _AT_REST = color_of("communication"), "#FFFFFF"
_MOST = 16


def attention_tiles(
    kinds: Sequence[Sequence[str]], *, current: tuple[int, int] | None = None
) -> Picture:
    """Draw a tile for each of `kinds[block of queries][block of keys]`: full, masked or skipped.

    current: (row, column) of the tile that is worked on: it and the blocks of Q, K, V and O that it
    needs are drawn in another colour.

    Raises ValueError for another kind, rows of unequal length, and more than 16 rows or columns.
    """
    rows, columns = _check(kinds, current)
    size = 7.0 / max(rows, columns)
    left, top = 4.3, 1.5
    canvas = Canvas(width=16.0, height=top + rows * size + 1.2)
    here = current or (-1, -1)
    for row in range(rows):
        y, in_hand = top + row * size, _IN_HAND if row == here[0] else _AT_REST
        for name, x in (("Q", left - 1.5), ("O", left + columns * size + 0.4)):
            canvas.box(x, y, 1.1, size - 0.08, f"{name} {row + 1}", color=in_hand, fontsize=9)
        for column in range(columns):
            x, kind = left + column * size, kinds[row][column]
            color = _IN_HAND if (row, column) == here else _COLORS[kind]
            canvas.box(x, y, size - 0.08, size - 0.08, color=color)
    for column in range(columns):
        color = _IN_HAND if column == here[1] else _AT_REST
        label = f"K, V {column + 1}" if size > 0.8 else str(column + 1)
        canvas.box(left + column * size, 0.3, size - 0.08, 0.8, label, color=color, fontsize=9)
    found = Counter(kind for line in kinds for kind in line)
    key = {_COLORS[kind]: _SAID[kind] for kind in _COLORS if found[kind]}
    if current is not None:
        key[_IN_HAND] = "in fast memory now"
    x, y = 2.8, top + rows * size + 0.35
    for color, text in key.items():
        canvas.box(x, y, 0.35, 0.35, color=color)
        canvas.text(x + 0.5, y + 0.19, text, ha="left", fontsize=9)
        x += 1.3 + 0.17 * len(text)
    return canvas.picture(_describe(rows, columns, found, current))


def _check(kinds: Sequence[Sequence[str]], current: tuple[int, int] | None) -> tuple[int, int]:
    rows, lengths = len(kinds), sorted({len(line) for line in kinds})
    if len(lengths) != 1 or not 1 <= rows <= _MOST or not 1 <= lengths[0] <= _MOST:
        raise ValueError(
            f"kinds has {rows} rows, of {lengths} entries: expected 1 to {_MOST} rows of one "
            "length, 1 to 16; more tiles do not fit a drawing: make the blocks larger"
        )
    if strange := sorted({kind for line in kinds for kind in line} - set(_COLORS)):
        raise ValueError(f"kinds holds {strange}: expected entries among {list(_COLORS)}")
    if current is not None and not (0 <= current[0] < rows and 0 <= current[1] < lengths[0]):
        raise ValueError(f"current is {current}: expected a tile of {rows} x {lengths[0]}")
    return rows, lengths[0]


def _describe(rows: int, columns: int, found: Counter[str], current: tuple[int, int] | None) -> str:
    counts = ", ".join(f"{found[kind]} {_SAID[kind]}" for kind in _COLORS if found[kind])
    text = f"{rows} x {columns} tiles of scores, blocks of queries by blocks of keys: {counts}."
    if current is None:
        return text
    row, column = current[0] + 1, current[1] + 1
    return (
        f"{text} In fast memory now: the tile of queries {row} and keys {column}, with Q {row}, "
        f"K {column}, V {column} and O {row}."
    )
