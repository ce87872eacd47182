"""Lesson 20: attention scores cut into tiles: computed, to come, masked, skipped, in hand.

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

_KINDS = {  # what a tile is: its colour, and what the key says
    "full": (color_of("compute"), "computed"),
    "masked": ("#88CCEE", "computed and masked"),
    "skipped": (color_of("idle"), "skipped"),
    "to come": ("#DDCC77", "still to compute"),
    "in hand": (color_of("communication"), "in fast memory now"),
}


def attention_tiles(
    kinds: Sequence[Sequence[str]], *, current: tuple[int, int] | None = None
) -> Picture:
    """Draw a tile for each of `kinds[block of queries][block of keys]`: full, masked or skipped.

    current: (row, column) of the tile that is worked on: it and the blocks of Q, K, V and O that it
    needs are drawn in another colour, and the tiles after it, row by row, as still to compute.

    Raises ValueError for another kind, rows of unequal length, and more than 16 rows or columns.
    """
    rows, columns = _check(kinds, current)
    here = current or (rows, columns)
    tiles = {(i, j): kind for i, line in enumerate(kinds) for j, kind in enumerate(line)}
    tiles = {at: "to come" if at > here and k != "skipped" else k for at, k in tiles.items()}
    tiles |= {current: "in hand"} if current else {}
    found = Counter(tiles.values())
    size, left, top = 7.0 / max(rows, columns), 4.3, 1.5
    many = f"{found['skipped']} of {rows * columns} tiles are never computed"
    title = many if found["skipped"] else "One tile of scores at a time"
    canvas = Canvas(width=16.0, height=top + rows * size + 1.2, title=title)

    def box(x: float, y: float, width: float, height: float, text: str, in_hand: bool) -> None:
        color = _KINDS["in hand"][0] if in_hand else "#FFFFFF"
        canvas.box(x, y, width, height, text, color=color, fontsize=9)

    for (i, j), kind in tiles.items():
        x, y = left + j * size, top + i * size
        canvas.box(x, y, size - 0.08, size - 0.08, color=_KINDS[kind][0])
    for i in range(rows):
        for name, x in (("Q", left - 1.5), ("O", left + columns * size + 0.4)):
            box(x, top + i * size, 1.1, size - 0.08, f"{name} {i + 1}", i == here[0])
    for j in range(columns):
        label = f"K, V {j + 1}" if size > 0.8 else str(j + 1)
        box(left + j * size, 0.3, size - 0.08, 0.8, label, j == here[1])
    x, y = 2.8, top + rows * size + 0.35
    for color, text in (_KINDS[kind] for kind in _KINDS if found[kind]):
        canvas.box(x, y, 0.35, 0.35, color=color)
        canvas.text(x + 0.5, y + 0.19, text, ha="left", fontsize=9)
        x += 1.3 + 0.17 * len(text)
    counts = ", ".join(f"{found[k]} {_KINDS[k][1]}" for k in [*_KINDS][:-1] if found[k])
    said = f"{rows} x {columns} tiles of scores, blocks of queries by blocks of keys: {counts}."
    if current:
        i, j = current[0] + 1, current[1] + 1
        now = f"the tile of queries {i} and keys {j}, with Q {i}, K {j}, V {j} and O {i}"
        said += f" In fast memory now: {now}."
    return canvas.picture(said)


def _check(kinds: Sequence[Sequence[str]], current: tuple[int, int] | None) -> tuple[int, int]:
    rows, lengths = len(kinds), sorted({len(line) for line in kinds})
    if len(lengths) != 1 or not 1 <= rows <= 16 or not 1 <= lengths[0] <= 16:
        found = f"kinds has {rows} rows, of {lengths} entries"
        raise ValueError(f"{found}: expected 1 to 16, of one length; make the blocks larger")
    if strange := sorted({k for line in kinds for k in line} - {"full", "masked", "skipped"}):
        raise ValueError(f"kinds holds {strange}: expected 'full', 'masked' or 'skipped'")
    if current is not None and not (0 <= current[0] < rows and 0 <= current[1] < lengths[0]):
        raise ValueError(f"current is {current}: expected a tile of {rows} x {lengths[0]}")
    return rows, lengths[0]
