"""Scalable drawings as text, for what is redrawn while a slider moves: rectangles, texts, lines.

A drawing of matplotlib's takes a quarter of a second; one of these takes a millisecond. Widths of
texts are those of DejaVu Sans, which most fonts stay below. Nothing here is random or numbered: the
same calls give the same text.

Left out: figures that a notebook stores; those are `Picture` objects.

    svg = Svg(width=900, height=60, title="One bar", description="A bar of 3 GiB.")
    svg.rectangle(0, 10, 300, 20, "#332288")                # or HATCHED
    svg.text(310, 25, "3 GiB")
    svg.as_text()
"""

from __future__ import annotations

from functools import lru_cache
from html import escape
from pathlib import Path

import matplotlib
from matplotlib.colors import to_hex, to_rgb
from matplotlib.ft2font import FT2Font

from playbook_utils.show.style import INK

__all__ = ["HATCHED", "Svg", "text_width", "tint"]

HATCHED = "url(#hatched)"
"""A fill for `Svg.rectangle` that is no colour: oblique grey lines on white."""

_FONT = "DejaVu Sans, Verdana, sans-serif"
_FONT_SIZE = 100


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Width in pixels of `text` at `size` pixels."""
    return sum(_advance(character, bold) for character in text) * size


@lru_cache(maxsize=256)
def _advance(character: str, bold: bool) -> float:
    """Width of one character, in units of the font's size."""
    return float(_font(bold).load_char(ord(character)).linearHoriAdvance) / 65536 / _FONT_SIZE


@lru_cache(maxsize=2)
def _font(bold: bool) -> FT2Font:
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    font = FT2Font(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name))
    font.set_size(_FONT_SIZE, 72)
    return font


def tint(color: str, share: float) -> str:
    """`color` mixed with this share of white."""
    red, green, blue = (part + (1 - part) * share for part in to_rgb(color))
    return to_hex((red, green, blue))


class Svg:
    """A white sheet, (0, 0) at the upper left, that is as wide as its page up to `width` pixels.

    title and description are what screen readers say; the title is also shown on hovering.
    """

    def __init__(self, *, width: float, height: float, title: str, description: str) -> None:
        self.width = width
        self.height = height
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width:g} '
            f'{height:g}" aria-label="{escape(title)}" style="display:block;width:100%;'
            f'max-width:{width:g}px;height:auto" font-family="{_FONT}">',
            f"<title>{escape(title)}</title><desc>{escape(description)}</desc>",
            f'<defs><pattern id="{HATCHED[5:-1]}" width="6" height="6" '
            'patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            '<rect width="6" height="6" fill="white"/>'
            '<rect width="2.5" height="6" fill="#8A8A8A"/></pattern></defs>',
            f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
        ]

    def rectangle(
        self, x: float, y: float, width: float, height: float, color: str, hint: str = ""
    ) -> None:
        """Draw a filled rectangle; `hint` is shown while the mouse rests on it."""
        inner = f"><title>{escape(hint)}</title></rect>" if hint else "/>"
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{color}"{inner}'
        )

    def line(
        self, start: tuple[float, float], end: tuple[float, float], color: str, *, dashed: bool
    ) -> None:
        """Draw a thin line."""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" '
            f'stroke="{color}" stroke-width="1.3"{dashes}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        color: str = INK,
        bold: bool = False,
        anchor: str = "start",
        halo: str = "",
    ) -> None:
        """Write `text` with its base line at y; a `halo` of the background's colour keeps it
        readable across a line."""
        look = ' font-weight="bold"' if bold else ""
        look += f' text-anchor="{anchor}"' if anchor != "start" else ""
        if halo:
            look += f' stroke="{halo}" stroke-width="4" paint-order="stroke"'
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{color}"{look}>'
            f"{escape(text)}</text>"
        )

    def as_text(self) -> str:
        """The whole drawing."""
        return "".join([*self._parts, "</svg>"])
