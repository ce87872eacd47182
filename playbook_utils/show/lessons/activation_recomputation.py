"""Lesson 02: what is held while, and which layers run twice.

Left out: what happens inside a layer, which selective recomputation is about.
"""

from __future__ import annotations

from playbook_utils.show.canvas import Canvas, expect_within
from playbook_utils.show.style import Picture, color_of

__all__ = ["recomputation_diagram"]

_HELD, _NOT_HELD = color_of("activations"), "#FFFFFF"
_FORWARD, _BACKWARD, _IDLE = (color_of(kind) for kind in ("forward", "backward", "idle"))


def recomputation_diagram(num_layers: int = 6, num_segments: int = 3) -> Picture:
    """Layers in a row, cut into segments; what each keeps above it, at five moments of a step.

    num_layers: 2 to 12. num_segments: 2 or more, and a divisor of num_layers.
    """
    expect_within(2, 12, num_layers=num_layers)
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
        # name, layers that run, their colour, those whose inside and whose input is held
        ("forward,\nnothing forgotten", everything, _FORWARD, everything, everything),
        ("forward, only the\nsegments' inputs kept", everything, _FORWARD, set[int](), starts),
        ("last segment:\nforward again", last, _FORWARD, last, starts | last),
        ("last segment:\nbackward", last, _BACKWARD, last, starts | last),
        ("the segment before:\nforward again", before, _FORWARD, before, later),
    ]
    canvas = Canvas(width=13.5, height=1.35 * len(rows), title="One segment at a time is held")
    column = 10.6 / num_layers
    for number, (name, running, color, insides, inputs) in enumerate(rows):
        top = 1.35 * number
        canvas.text(2.5, top + 0.72, name, ha="right", fontsize=9.5)
        for layer in range(num_layers):
            x = 2.75 + layer * column
            held = _HELD if layer in insides else _NOT_HELD
            word = ("held" if layer in insides else "not held") if column > 1 else ""
            canvas.box(x + 0.24, top + 0.1, column - 0.34, 0.42, word, color=held, fontsize=8.5)
            canvas.box(x, top + 0.1, 0.16, 0.42, color=_HELD if layer in inputs else _NOT_HELD)
            fill = color if layer in running else _IDLE
            label = f"layer {layer + 1}" if column > 1 else str(layer + 1)
            canvas.box(x, top + 0.6, column - 0.1, 0.5, label, color=fill, fontsize=9)
    return canvas.picture(
        f"{num_layers} layers in {num_segments} segments. Without recomputation, all layers hold "
        "their activations until backward. With it, forward keeps the input of each segment alone; "
        "backward takes the segments from the last to the first, runs the layers of one forward "
        "again, holds their activations, goes backward through them and lets them go."
    )
