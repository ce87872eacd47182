"""Where labels go so that they neither overlap nor leave their bar.

Text is measured with the renderer, so these are called once everything else is drawn.

    place_line_labels(axes, {"naive": (x, y, color), "bucketed": (x, y, color)})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.transforms import blended_transform_factory

__all__ = ["label_size", "place_line_labels", "spread", "write_inside"]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions at least `gap` apart and as near to the wanted ones as that allows.

    They keep their order and stay within [low, high] where there is room for all of them. Least
    squares: neighbours that would overlap share the mean of their shifts (pool adjacent
    violators).
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    blocks: list[list[float]] = []  # shifts of labels that touch
    for place, i in enumerate(order):
        blocks.append([wanted[i] - place * gap])
        while len(blocks) > 1 and fmean(blocks[-2]) >= fmean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    shifts = [fmean(block) for block in blocks for _ in block]
    top = high - (len(wanted) - 1) * gap
    heights = [max(min(shift, top), low) + place * gap for place, shift in enumerate(shifts)]
    return [height for _, height in sorted(zip(order, heights, strict=True))]


def label_size(text: Text) -> tuple[float, float]:
    """Width and height of a text in pixels."""
    box = text.get_window_extent()
    return box.width, box.height


def place_line_labels(axes: Axes, ends: Mapping[str, tuple[float, float, str]]) -> None:
    """Write each label right of the axes, level with its line's last point (x, y) or close to it.

    A thin line leads from the point to its label. Fixes the layout of the figure.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    beside = blended_transform_factory(axes.transAxes, axes.transData)
    texts = [
        axes.text(1.03, y, label, color=_darker(color), va="center", transform=beside)
        for label, (_, y, color) in ends.items()
    ]
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    points = [axes.transData.transform((x, y)) for x, y, _ in ends.values()]
    bounds = axes.get_window_extent()
    gap = 1.1 * max(label_size(text)[1] for text in texts)
    top = min(bounds.y1, figure.bbox.y1 - gap / 2)  # above it a label would be cut off
    heights = spread([float(point[1]) for point in points], gap, bounds.y0, top)
    to_axes = axes.transAxes.inverted()
    for text, point, height, end in zip(texts, points, heights, ends.values(), strict=True):
        level = float(to_axes.transform((0.0, height))[1])
        text.set_transform(axes.transAxes)
        text.set_position((1.03, level))
        x, y = map(float, to_axes.transform(point))
        leader = axes.plot([x, 1.005, 1.025], [y, y, level], transform=axes.transAxes)[0]
        leader.set(color=end[2], linewidth=0.7, clip_on=False, zorder=1)


def _darker(color: str) -> str:
    """The colour, dark enough to be read as text on white."""
    parts = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    while 0.299 * parts[0] + 0.587 * parts[1] + 0.114 * parts[2] > 115:
        parts = [int(part * 0.95) for part in parts]
    return "#" + "".join(f"{part:02x}" for part in parts)


def write_inside(
    axes: Axes, candidates: Sequence[tuple[float, float, float, str, str]], *, fontsize: float
) -> list[Text]:
    """Write texts into their bars where they fit, else their end from a number on, else nothing.

    candidates: (left, right, y of the middle, text, colour), in data units. "all_reduce bucket 3"
    becomes "bucket 3" or "3" on a short bar.
    """
    written = []
    for left, right, y, label, color in candidates:
        sides = axes.transData.transform([(left, y), (right, y)])
        room = sides[1][0] - sides[0][0] - 6
        words = label.split(" ")
        ends = [" ".join(words[i:]) for i in range(len(words)) if i == 0 or words[i][0].isdigit()]
        text = axes.text((left + right) / 2, y, "", color=color, fontsize=fontsize, clip_on=True)
        text.set(ha="center", va="center_baseline")
        for words_left in ends if room > 0 else []:
            text.set_text(words_left)
            if label_size(text)[0] <= room:
                written.append(text)
                break
        else:
            text.remove()
    return written
