"""Activation recomputation, drawn: what is held while, and which layers run twice.

    recomputation_diagram(num_layers=6, num_segments=3)

Left out: what happens inside a layer, which selective recomputation is about.
"""

from __future__ import annotations

from playbook_utils.show.diagrams import Canvas
from playbook_utils.show.style import CATEGORY_COLORS, KIND_COLORS, Picture

__all__ = ["recomputation_diagram"]

_HELD = CATEGORY_COLORS["activations"]
_FORWARD, _BACKWARD = KIND_COLORS["forward"], KIND_COLORS["backward"]
_NOT_YET = KIND_COLORS["idle"]
_EMPTY = "#FFFFFF"


def recomputation_diagram(num_layers: int = 6, num_segments: int = 3) -> Picture:
    """Layers in a row, cut into segments; what each keeps above it, at five moments of a step.

    num_layers: 2 to 12. num_segments: 2 or more, and a divisor of num_layers.
    """
    if not 2 <= num_layers <= 12:
        raise ValueError(f"num_layers is {num_layers}; expected 2 to 12, more do not fit a drawing")
    if num_segments < 2 or num_layers % num_segments:
        raise ValueError(
            f"num_segments is {num_segments}; expected 2 or more that divide {num_layers} layers"
        )
    size = num_layers // num_segments
    starts = set(range(0, num_layers, size))
    everything, last = set(range(num_layers)), set(range(num_layers - size, num_layers))
    before = {layer - size for layer in last}
    later = (starts | before) - last
    rows = [
        # name, layers by colour, layers whose inside is held, layers whose input is held
        ("forward,\nnothing forgotten", {_FORWARD: everything}, everything, everything),
        ("forward, only the\nsegments' inputs kept", {_FORWARD: everything}, set[int](), starts),
        ("last segment:\nforward again", {_FORWARD: last}, last, starts | last),
        ("last segment:\nbackward", {_BACKWARD: last}, last, starts | last),
        ("the segment before:\nforward again", {_FORWARD: before}, before, later),
    ]
    canvas = Canvas(width=13.5, height=1.35 * len(rows))
    for number, (name, colors, insides, inputs) in enumerate(rows):
        _draw_row(canvas, 1.35 * number, name, num_layers, colors, insides, inputs)
    return canvas.picture(
        f"{num_layers} layers in {num_segments} segments. Without recomputation, all layers hold "
        "their activations until backward. With it, forward keeps the input of each segment alone; "
        "backward takes the segments from the last to the first, runs the layers of one forward "
        "again, holds their activations, goes backward through them and lets them go."
    )


def _draw_row(
    canvas: Canvas,
    top: float,
    name: str,
    num_layers: int,
    colors: dict[str, set[int]],
    insides: set[int],
    inputs: set[int],
) -> None:
    left, full = 2.75, 10.6
    column = full / num_layers
    canvas.text(left - 0.25, top + 0.72, name, ha="right", fontsize=9.5)
    color_of = {layer: color for color, layers in colors.items() for layer in layers}
    for layer in range(num_layers):
        x = left + layer * column
        held = _HELD if layer in insides else _EMPTY
        canvas.box(x + 0.24, top + 0.1, column - 0.34, 0.42, color=held)
        canvas.box(x, top + 0.1, 0.16, 0.42, color=_HELD if layer in inputs else _EMPTY)
        color = color_of.get(layer, _NOT_YET)
        label = f"layer {layer + 1}" if column > 1 else str(layer + 1)
        canvas.box(x, top + 0.6, column - 0.1, 0.5, label, color=color, fontsize=9)
