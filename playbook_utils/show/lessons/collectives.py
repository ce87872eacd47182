"""Lesson 05: what an all-reduce is for, and which rank's data is where.

Each box is one part of a rank's tensor, coloured by the ranks whose data is in it, so that the
picture is made from what was really sent. Give each rank numbers that tell where they come from:
`origin_code` writes a power of two a (rank, part), `origins` reads any sum of them back.

    before = [[origin_code(rank, part, 3) for part in range(3)] for rank in range(3)]
    after = launch(all_reduce_of, before, world_size=3)
    show.pieces({"all_reduce": [before, after]}, parts=3)

Left out: data that was changed by more than being copied and added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from matplotlib.patches import Rectangle

from playbook_utils.show.canvas import Canvas
from playbook_utils.show.style import QUIET, Picture, color_of, rank_color, text_color_on

__all__ = ["all_reduce_diagram", "origin_code", "origins", "pieces"]

Grid = Sequence[Sequence[int]]
"""One row a rank, one number a part; 0 is an empty box."""
Messages = Iterable[tuple[int, int]]
"""(source, destination) of each message of a step."""

_GAP, _HEAD, _SIDE = 2.2, 1.5, 1.3


def all_reduce_diagram() -> Picture:
    """Three ranks, each with numbers of its own; an all-reduce; the sum on every rank."""
    canvas = Canvas(width=13.5, height=4.9, title="Three processes, and all need the sum")
    for x, head in ((2.7, "each has its own numbers"), (10.8, "everybody has the sum")):
        canvas.text(x + 0.3, 0.25, head, fontsize=11, fontweight="bold")
    middle = canvas.box(6.0, 0.7, 1.9, 3.9, "all-reduce", color=color_of("communication"))
    canvas.names(1.1, ["rank 0", "rank 1", "rank 2"], [(0.7, 1.1), (2.1, 1.1), (3.5, 1.1)])
    for rank in range(3):
        y, numbers = 0.7 + 1.4 * rank, "   ".join(str(n * 10**rank) for n in (1, 2, 3))
        own = canvas.box(1.4, y, 3.2, 1.1, numbers, color=rank_color(rank), fontsize=13)
        total = canvas.box(9.3, y, 3.6, 1.1, "111   222   333", fontsize=13)
        canvas.arrow(own.right, (middle.left[0], own.right[1]))
        canvas.arrow((middle.right[0], total.left[1]), total.left)
    return canvas.picture(
        "Three ranks hold the numbers 1 2 3, 10 20 30 and 100 200 300. An all-reduce adds them up. "
        "Afterwards every rank holds 111 222 333."
    )


def origin_code(rank: int, part: int, parts: int) -> int:
    """The number that stands for part `part` of rank `rank`; sums of such numbers stay readable.

    Raises ValueError for more than 62 of them: they would not fit an int64.
    """
    if not 0 <= part < parts or rank < 0 or rank * parts + part > 62:
        raise ValueError(
            f"rank {rank}, part {part} of {parts}: expected a part below {parts} and at most 62 "
            "(rank, part) pairs, one bit of an int64 each"
        )
    return 1 << (rank * parts + part)


def origins(number: int, parts: int) -> tuple[tuple[int, int], ...]:
    """The (rank, part) pairs whose codes add up to `number`, each of them at most once.

    Raises ValueError for a negative number.
    """
    if number < 0:
        raise ValueError(f"{number} is negative: expected a sum of `origin_code` numbers")
    return tuple(divmod(bit, parts) for bit in range(number.bit_length()) if number >> bit & 1)


def pieces(
    stories: Mapping[str, Sequence[Grid]],
    *,
    parts: int,
    messages: Mapping[str, Sequence[Messages]] | None = None,
    columns: int = 1,
    description: str = "",
) -> Picture:
    """Draw {title: [state, next state, ...]}: every state a grid, ranks downwards.

    Args:
        stories: states as numbers made by `origin_code`, all with the same number of ranks.
        parts: parts a rank's tensor was cut into, as given to `origin_code`.
        messages: for a story, the messages of each step, drawn as arrows between its states.
            Without them an arrow leads from each rank to those where its data is new.
            What is new has a bold frame, of another colour in a scatter than in a gather.
        columns: stories side by side.

    Raises ValueError for no story, states of different numbers of ranks, and messages that are not
    one list a step.
    """
    given = messages or {}
    for name, states in stories.items():
        _check(name, states, given.get(name))
    if not stories:
        raise ValueError("no stories to draw: pass {title: [state, next state]}")
    told = stories.values()
    widths = [_SIDE + sum(map(_cells, states)) + _GAP * (len(states) - 1) for states in told]
    ranks = max(len(states[0]) for states in told)
    column, row = max(widths) + 1.2, ranks + _HEAD + 0.9
    canvas = Canvas(width=column * columns, height=row * -(-len(stories) // columns))
    for place, (name, states) in enumerate(stories.items()):
        x, y = column * (place % columns), row * (place // columns)
        canvas.text(x, y + 0.35, name, ha="left", fontsize=9.5, fontweight="bold")
        steps = given.get(name) or [
            _new_data(before, after, parts) for before, after in pairwise(states)
        ]
        hue = color_of(next((k for k in ("scatter", "gather") if k in name), "communication"))
        arrows = hue if name in given else ""
        _draw_states(canvas, x + _SIDE, y + _HEAD - 0.5, states, parts, steps, hue, arrows)
    said = description or f"Whose data is on which rank, step by step: {', '.join(stories)}."
    return canvas.picture(said)


def _check(name: str, states: Sequence[Grid], steps: Sequence[Messages] | None) -> None:
    heights = {len(state) for state in states}
    if len(heights) != 1 or 0 in heights:
        raise ValueError(
            f"{name!r} has states of {sorted(heights)} ranks: expected the same number in each"
        )
    if steps is not None and len(steps) != len(states) - 1:
        raise ValueError(
            f"{name!r} has {len(states)} states and messages of {len(steps)} steps: expected one "
            "list of messages between each two states"
        )


def _cells(state: Grid) -> int:
    return max((len(row) for row in state), default=0)


def _draw_states(
    canvas: Canvas,
    left: float,
    top: float,
    states: Sequence[Grid],
    parts: int,
    steps: Sequence[Messages],
    hue: str,
    arrows: str,
) -> None:
    """Grids from left to right, ranks downwards, arrows between them ("": in the rank's colour)."""
    for rank in range(len(states[0])):
        canvas.text(
            left - 0.25, top + rank + 0.45, f"rank {rank}", ha="right", fontsize=8, color=QUIET
        )
    for number, state in enumerate(states):
        for rank, row in enumerate(state):
            old = states[number - 1][rank] if number else row
            for part, code in enumerate(row):
                changed = part >= len(old) or old[part] != code
                _draw_cell(
                    canvas, left + part, top + rank, origins(code, parts), hue if changed else ""
                )
        left += _cells(state) + _GAP
        for source, destination in sorted(set(steps[number])) if number < len(steps) else []:
            start, end = (left - _GAP + 0.15, top + source + 0.45), top + destination + 0.45
            canvas.arrow(start, (left - 0.15, end), color=arrows or rank_color(source))


def _draw_cell(
    canvas: Canvas, x: float, y: float, found: tuple[tuple[int, int], ...], hue: str
) -> None:
    """A box, striped by the ranks that contributed; `hue` is its bold edge where it is new."""
    side = 0.9
    for place, (rank, _) in enumerate(found):
        stripe = side / len(found)
        patch = Rectangle((x, y + place * stripe), side, stripe, facecolor=rank_color(rank), lw=0)
        canvas.axes.add_patch(patch)
    edge, width = (hue, 1.8) if hue and found else ("#CCCCCC", 0.6)
    canvas.axes.add_patch(Rectangle((x, y), side, side, fill=False, edgecolor=edge, lw=width))
    if len(found) == 1:
        ((rank, part),) = found
        ink, label = text_color_on(rank_color(rank)), f"{chr(ord('A') + rank)}{part}"
        canvas.text(x + side / 2, y + side / 2, label, fontsize=8, color=ink)


def _new_data(before: Grid, after: Grid, parts: int) -> list[tuple[int, int]]:
    """(source, destination) where a rank holds data of another that it did not hold before."""
    found = []
    for rank, row in enumerate(after):
        held = {pair for code in before[rank] for pair in origins(code, parts)}
        new = {pair for code in row for pair in origins(code, parts)} - held
        found += [(source, rank) for source, _ in new if source != rank]
    return found
