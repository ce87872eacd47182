"""Lesson 07: who holds what under ZeRO, and spans made ready to be drawn.

In the drawing, widths are bytes a parameter: 2 for BF16 params, 2 for BF16 grads, 12 for Adam's
FP32 optimizer states (Rajbhandari et al. 2020, figure 1). Left out: activations, which ZeRO does
not cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from playbook_utils.events import Span
from playbook_utils.show.canvas import Canvas, expect_within
from playbook_utils.show.style import QUIET, Picture, color_of

__all__ = ["gathers_and_scatters", "zero_diagram"]

_BYTES = {"params": 2, "grads": 2, "optimizer_states": 12}
_HEADS = {
    "params": "params,\n2 bytes",
    "grads": "grads,\n2 bytes",
    "optimizer_states": "optimizer states, 12 bytes:\nmaster and two moments (FP32)",
}
_SHARDED_FROM = {"params": 3, "grads": 2, "optimizer_states": 1}


def zero_diagram(world_size: int = 4) -> Picture:
    """What each rank holds in stages 0 to 3, to scale; a pale outline shows what it gave up.

    world_size: number of ranks drawn, 1 to 8.
    """
    expect_within(1, 8, world_size=world_size)
    total = sum(_BYTES.values())
    left, row, gap = 2.9, 0.5, 0.55
    height = 0.9 + 4 * (world_size * row + gap)
    title = f"What each of {world_size} ranks holds, for one parameter"
    canvas = Canvas(width=left + total + 2.6, height=height, title=title)
    x = left
    for kind, size in _BYTES.items():
        canvas.text(x + size / 2, 0.4, _HEADS[kind], fontsize=9)
        x += size
    for stage in range(4):
        top = 0.9 + stage * (world_size * row + gap)
        canvas.text(0.1, top + world_size * row / 2, f"stage {stage}", ha="left", fontweight="bold")
        for rank in range(world_size):
            _draw_rank(canvas, left, top + rank * row, row, stage, rank, world_size)
        held = sum(s / (world_size if stage >= _SHARDED_FROM[k] else 1) for k, s in _BYTES.items())
        middle = top + world_size * row / 2
        canvas.text(left + total + 0.2, middle, f"{held:.3g} bytes a\nparameter", ha="left")
    return canvas.picture(
        f"What each of {world_size} ranks holds: in stage 0 all params, grads and optimizer "
        f"states; in stage 1 a {_part(world_size)} of the optimizer states; in stage 2 also of the "
        "grads; in stage 3 also of the params. Each rank holds another part."
    )


def _draw_rank(
    canvas: Canvas, left: float, y: float, row: float, stage: int, rank: int, world_size: int
) -> None:
    canvas.text(left - 0.2, y + row / 2 - 0.04, f"rank {rank}", ha="right", fontsize=8, color=QUIET)
    for kind, size in _BYTES.items():
        canvas.box(left, y, size - 0.06, row - 0.1)
        sharded = stage >= _SHARDED_FROM[kind]
        width = (size - 0.06) / (world_size if sharded else 1)
        place = left + (rank * width if sharded else 0.0)
        canvas.box(place, y, width, row - 0.1, color=color_of(kind))
        left += size


def _part(world_size: int) -> str:
    return "whole" if world_size == 1 else "half" if world_size == 2 else f"1/{world_size}"


def gathers_and_scatters(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The spans with gathers and scatters told apart, and computing cut where its rank is idle.

    A forward that stops for a layer's weights is one span with an "idle" one inside it. Drawn as it
    is, the two share the height of the row; cut, the row shows grey where the rank waits.
    """
    spans = tuple(spans)
    kept = []
    for span in (span for span in spans if span.kind != "idle"):
        if span.kind == "communication":
            named = (kind for kind in ("gather", "scatter") if kind in span.name)
            span = replace(span, kind=next(named, "communication"))
        pieces = [span]
        for wait in spans if span.lane == "compute" else ():
            if wait.kind == "idle" and wait.rank == span.rank:
                pieces = [part for piece in pieces for part in _cut(piece, wait)]
        kept += pieces
    return tuple(kept)


def _cut(span: Span, wait: Span) -> list[Span]:
    before = replace(span, end_s=min(span.end_s, wait.start_s))
    after = replace(span, start_s=max(span.start_s, wait.end_s))
    return [piece for piece in (before, after) if piece.start_s < piece.end_s]
