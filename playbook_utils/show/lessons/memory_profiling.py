"""Lesson 01: one training step, what is held in memory, and from when to when.

Time runs from left to right through forward, backward and optimizer; each row is one kind of
memory, as high as the share of it that is there. Left out: sizes (every row is drawn as high as
the others) and temporaries.
"""

from __future__ import annotations

from playbook_utils.show.canvas import Canvas
from playbook_utils.show.style import INK, QUIET, Picture, color_of

__all__ = ["training_step"]

_LEFT, _BACKWARD, _OPTIMIZER, _END = 2.6, 6.2, 10.8, 13.4
"""Where forward, backward, optimizer begin, and the last of them ends."""
_LAYERS = 6
"""Steps of the stairs: a layer's activations come at once, and go at once."""


def training_step() -> Picture:
    """The first step: the optimizer's states come at its end, and stay."""
    canvas = Canvas(width=13.5, height=6.5)
    columns = (("forward", _LEFT, _BACKWARD), ("backward", _BACKWARD, _OPTIMIZER))
    for name, start, end in (*columns, ("optimizer", _OPTIMIZER, _END)):
        canvas.box(start, 0.1, end - start - 0.08, 0.7, name, color=color_of(name))
    rises, falls = _stairs(_LEFT, _BACKWARD), _stairs(_BACKWARD, _OPTIMIZER)
    held = [*rises, *((x, 1 - share) for x, share in falls)]
    grads, made = [*falls, (_END, 1.0)], _OPTIMIZER + 0.9
    states = [(_LEFT, 0.0), (made, 0.0), (made, 1.0), (_END, 1.0)]
    rows: dict[str, tuple[list[tuple[float, float]], str, float, str]] = {
        # kind: (corners of what is held, remark, where it is centred, its colour)
        "activations": (held, "each layer keeps\nwhat its backward reads", _BACKWARD, "white"),
        "grads": (grads, "as large as the params;\nfreed after the step", 11.6, INK),
        "optimizer_states": (states, "made by\nthe first step", 12.55, INK),
        "params": ([(_LEFT, 1.0), (_END, 1.0)], "always there", (_LEFT + _END) / 2, "white"),
    }
    for place, (kind, (corners, remark, place_x, ink)) in enumerate(rows.items()):
        bottom = 2.25 + 1.38 * place
        canvas.text(_LEFT - 0.2, bottom - 0.55, kind.replace("_", "\n"), ha="right")
        # Fill below the corners, whose ground is at y = bottom.
        xs = [corners[0][0], *(x for x, _ in corners), corners[-1][0]]
        ys = [bottom, *(bottom - 1.1 * share for _, share in corners), bottom]
        canvas.axes.fill(xs, ys, color=color_of(kind), linewidth=0)
        canvas.axes.plot([_LEFT, _END], [bottom] * 2, color=QUIET, linewidth=0.8)
        low = bottom - (0.32 if kind == "activations" else 0.55)
        canvas.text(place_x, low, remark, color=ink, fontsize=9)
    for x in (_BACKWARD, _OPTIMIZER):
        canvas.axes.plot([x - 0.04] * 2, [0.9, 6.45], color=QUIET, linewidth=0.9, ls=":", zorder=0)
    return canvas.picture(
        "One training step. Activations grow layer by layer in forward and shrink in backward, "
        "while gradients grow to the size of the parameters; the optimizer states come into being "
        "in the optimizer's part and stay; parameters are always there."
    )


def _stairs(start: float, end: float) -> list[tuple[float, float]]:
    """Corners of stairs from 0 to 1, a step a layer."""
    width = (end - start) / _LAYERS
    corners = [(start, 0.0)]
    for layer in range(_LAYERS):
        x, share = start + (layer + 0.5) * width, (layer + 1) / _LAYERS
        corners += [(x, layer / _LAYERS), (x, share)]
    return [*corners, (end, 1.0)]
