"""What the tests ask of a figure: its texts, where they are, and which overlap."""

from __future__ import annotations

from itertools import combinations
from unittest import mock

from matplotlib.text import Text
from matplotlib.transforms import Bbox

from playbook_utils.show import Picture


def texts(picture: Picture) -> list[Text]:
    """All texts that are really drawn: no ticks beyond the axes, nothing switched off."""
    found: list[Text] = []
    draw = Text.draw

    def draw_and_note(text: Text, renderer: object) -> None:
        if text.get_text().strip():
            found.append(text)
        draw(text, renderer)

    with mock.patch.object(Text, "draw", draw_and_note):
        picture.figure.draw_without_rendering()
    return list(dict.fromkeys(found))


def boxes(picture: Picture, which: set[str] | None = None) -> list[tuple[str, Bbox]]:
    """(text, its box in pixels) of all texts, or of these."""
    renderer = picture.figure.canvas.get_renderer()
    return [
        (text.get_text(), text.get_window_extent(renderer))
        for text in texts(picture)
        if which is None or text.get_text() in which
    ]


def flaws(picture: Picture, least_points: float = 8) -> list[str]:
    """What makes a figure hard to read: texts that overlap, are cut off, or are too small."""
    found = boxes(picture)
    edge = picture.figure.bbox
    return [
        *(f"{a!r} and {b!r} overlap" for (a, x), (b, y) in combinations(found, 2) if _cover(x, y)),
        *(f"{text!r} is cut off" for text, box in found if not _within(box, edge)),
        *(f"{t.get_text()!r} is tiny" for t in texts(picture) if t.get_fontsize() < least_points),
    ]


def _cover(first: Bbox, second: Bbox) -> bool:
    """Whether two boxes share more than a pixel's width."""
    wide = first.x0 + 1 < second.x1 and second.x0 + 1 < first.x1
    return wide and first.y0 + 1 < second.y1 and second.y0 + 1 < first.y1


def _within(box: Bbox, edge: Bbox) -> bool:
    wide = box.x0 >= edge.x0 - 1 and box.x1 <= edge.x1 + 1
    return wide and box.y0 >= edge.y0 - 1 and box.y1 <= edge.y1 + 1
