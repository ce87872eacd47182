"""A prediction of memory as bars: parameters, gradients, optimizer states, activations, total.

What is there beside the total for a moment only, at the peak, stands at the end of the total's bar,
hatched (grey in `memory_bars`): whether a GPU holds the rank is a question of the peak.

`explorer_svg` draws one estimate in full, every component split into its parts, fast enough to be
redrawn while a slider moves. `memory_bars` draws the totals of one or several estimates as a
`Picture`, for notebooks that are stored.

    estimate = predict_memory(preset("llama-3-8b"), seq_len=4096)
    show.memory_bars({"one H100": estimate}, gpu="h100-sxm")
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate

from playbook_utils.predict.hardware import Accelerator
from playbook_utils.predict.hardware import gpu as find_gpu
from playbook_utils.predict.headroom import usable_bytes, verdict
from playbook_utils.predict.memory import CATEGORIES, MemoryEstimate
from playbook_utils.show.plots import stacked_bars
from playbook_utils.show.style import CATEGORY_COLORS, INK, Picture, text_color_on
from playbook_utils.show.svg import HATCHED, Svg, text_width, tint
from playbook_utils.show.units import bytes_text, bytes_unit

__all__ = ["FOR_A_MOMENT", "explorer_svg", "memory_bars"]

FOR_A_MOMENT = "for a moment"
"""What `MemoryEstimate.transient_bytes` is called."""

_WIDTH, _LEFT, _RIGHT = 900.0, 160.0, 880.0
_TOP, _BAR, _LINE = 46.0, 24.0, 15.0
_SMALL = 11.0
_FAR = 12.0  # a GPU that holds this many times the total is told of, not drawn


def explorer_svg(estimate: MemoryEstimate, gpu: Accelerator | None = None) -> str:
    """One bar a component, split into parts with a number each, then all stacked in the total, with
    what is there for a moment at its end.

    A dashed line is what `gpu` holds; where it is more than twelve times the peak, the bars keep
    their scale and the line is told of at the right edge instead.
    """
    rows = [
        (_words(name), _component(estimate, name), _shades(estimate, name)) for name in CATEGORIES
    ]
    rows.append(("total", *_whole(estimate)))
    notes = [_notes(parts, colors) for _, parts, colors in rows]
    height = _TOP + sum(_row_height(lines) for lines in notes) + 34
    holds = 0 if gpu is None else usable_bytes(gpu)
    far = holds > _FAR * estimate.peak_bytes
    reach = max(estimate.peak_bytes, 0 if far else holds, 1)
    svg = Svg(
        width=_WIDTH,
        height=height,
        title="Memory of one rank",
        description=_in_words(estimate, gpu),
    )
    scale = (_RIGHT - _LEFT) / reach
    _draw_scale(svg, reach, scale, height - 26)
    tops = list(accumulate((_row_height(lines) for lines in notes[:-1]), initial=_TOP))
    for y, (_, parts, colors) in zip(tops, rows, strict=True):
        _draw_bar(svg, y, parts, colors, scale)
    if gpu is not None:
        _draw_limit(svg, gpu, _RIGHT if far else _LEFT + holds * scale, height - 26, far)
    for y, (name, parts, colors), lines in zip(tops, rows, notes, strict=True):
        svg.text(10, y + 11, name, bold=True)
        kept = sum(size for part, size in parts.items() if part != FOR_A_MOMENT)
        svg.text(10, y + 27, bytes_text(kept), size=13)
        _write_inside(svg, y + 16, parts, colors, scale)
        _draw_notes(svg, y + _BAR + 12, lines)
    if estimate.transient_bytes:
        svg.text(10, y + 43, f"peak {bytes_text(estimate.peak_bytes)}", size=13)
    return svg.as_text()


def _words(name: str) -> str:
    return name.replace("_", " ")


def _component(estimate: MemoryEstimate, name: str) -> dict[str, int]:
    return {_words(part): size for part, size in estimate.parts[name].items() if size}


def _whole(estimate: MemoryEstimate) -> tuple[dict[str, int], list[str]]:
    """The total's parts and what is there for a moment; their fills."""
    parts = {_words(name): getattr(estimate, f"{name}_bytes") for name in CATEGORIES}
    fills = [CATEGORY_COLORS[name] for name in CATEGORIES]
    if estimate.transient_bytes:
        return parts | {FOR_A_MOMENT: estimate.transient_bytes}, [*fills, HATCHED]
    return parts, fills


def _shades(estimate: MemoryEstimate, name: str) -> list[str]:
    number = len(_component(estimate, name))
    return [tint(CATEGORY_COLORS[name], 0.6 * i / max(number - 1, 2)) for i in range(number)]


_Notes = list[list[tuple[str, str]]]


def _notes(parts: Mapping[str, int], colors: list[str]) -> _Notes:
    """Lines of (text, colour of its square), as many as their width asks for."""
    lines: _Notes = [[]]
    x = _LEFT
    for (name, size), color in zip(parts.items(), colors, strict=True):
        text = f"{name} {bytes_text(size)}"
        width = _note_width(text)
        if lines[-1] and x + width > _RIGHT:
            lines.append([])
            x = _LEFT
        lines[-1].append((text, color))
        x += width
    return lines


def _note_width(text: str) -> float:
    return 13 + text_width(text, _SMALL) + 14


def _row_height(lines: _Notes) -> float:
    return _BAR + _LINE * len(lines) + 12


def _draw_bar(
    svg: Svg, y: float, parts: Mapping[str, int], colors: list[str], scale: float
) -> None:
    left = _LEFT
    for (part, size), color in zip(parts.items(), colors, strict=True):
        # A gap parts neighbours; what is thinner than a pixel still shows.
        width = max(size * scale - 1, 0.6)
        svg.rectangle(left, y, width, _BAR, color, f"{part}: {size:,} bytes")
        left += size * scale


def _write_inside(
    svg: Svg, y: float, parts: Mapping[str, int], colors: list[str], scale: float
) -> None:
    """The names of the parts that have room for it."""
    left = _LEFT
    for (part, size), color in zip(parts.items(), colors, strict=True):
        width = size * scale
        if text_width(part, _SMALL) + 10 < width:
            under = "white" if color == HATCHED else color
            middle, ink = left + width / 2, text_color_on(under)
            svg.text(middle, y, part, size=_SMALL, anchor="middle", color=ink, halo=under)
        left += width


def _draw_notes(svg: Svg, y: float, lines: _Notes) -> None:
    for line in lines:
        x = _LEFT
        for text, color in line:
            svg.rectangle(x, y - 8, 9, 9, color)
            svg.text(x + 13, y, text, size=_SMALL, halo="white")
            x += _note_width(text)
        y += _LINE


def _draw_scale(svg: Svg, reach: float, scale: float, y: float) -> None:
    unit_bytes, unit = bytes_unit(reach)
    rough = reach / unit_bytes / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= rough)
    for i in range(int(reach / unit_bytes / step) + 1):
        x = _LEFT + i * step * unit_bytes * scale
        svg.line((x, _TOP - 4), (x, y), "#E8E8E8", dashed=False)
        label = f"{i * step:.10g}" + (f" {unit}" if i == 0 else "")
        svg.text(x, y + 16, label, size=_SMALL, anchor="middle", color="#5F5F5F")


def _draw_limit(svg: Svg, gpu: Accelerator, x: float, bottom: float, far: bool) -> None:
    label = f"{gpu.name} holds {bytes_text(usable_bytes(gpu))}"
    if far:
        svg.text(_RIGHT, _TOP - 16, f"{label}, far to the right →", anchor="end")
        return
    svg.line((x, _TOP - 10), (x, bottom), INK, dashed=True)
    half = text_width(label, 12) / 2
    svg.text(min(max(x, _LEFT + half), _RIGHT - half), _TOP - 16, label, anchor="middle")


def _in_words(estimate: MemoryEstimate, gpu: Accelerator | None) -> str:
    parts = [
        f"{_words(name)} {bytes_text(getattr(estimate, f'{name}_bytes'))}" for name in CATEGORIES
    ]
    words = f"{', '.join(parts)}; total {bytes_text(estimate.total_bytes)}"
    if estimate.transient_bytes:
        words += f", at the peak {bytes_text(estimate.peak_bytes)}"
    words += "."
    if gpu is None:
        return words
    return f"{words} It {verdict(estimate, gpu)}."


def memory_bars(
    estimates: MemoryEstimate | Mapping[str, MemoryEstimate],
    *,
    gpu: Accelerator | str | None = None,
    title: str = "Memory of one rank",
) -> Picture:
    """One stacked bar for each of {label: estimate} (or one estimate), and what `gpu` holds.

    gpu: an `Accelerator` or its name, "h100-sxm". Raises ValueError without estimates and for an
    unknown name.
    """
    named = estimates if isinstance(estimates, Mapping) else {"one rank": estimates}
    rows = {
        label: {
            **{name: getattr(estimate, f"{name}_bytes") for name in CATEGORIES},
            **({FOR_A_MOMENT: estimate.transient_bytes} if estimate.transient_bytes else {}),
        }
        for label, estimate in named.items()
    }
    limit = find_gpu(gpu) if isinstance(gpu, str) else gpu
    words = [f"{label}: {_in_words(estimate, limit)}" for label, estimate in named.items()]
    return stacked_bars(
        rows,
        unit="bytes",
        title=title,
        limit=None if limit is None else usable_bytes(limit),
        limit_label="" if limit is None else f"{limit.name} holds",
        description=" ".join([f"{title}.", *words]),
    )
