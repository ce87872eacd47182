"""Drawings as text: well-formed, with words for those who don't see them, and texts measured."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from playbook_utils.show.svg import HATCHED, Svg, text_width, tint

SVG = "{http://www.w3.org/2000/svg}"


def test_a_drawing_is_well_formed_and_says_in_words_what_it_shows() -> None:
    svg = Svg(width=100, height=50, title="A < B", description='Two "bars" & a line.')
    svg.rectangle(1, 2, 3, 4, "#332288", hint="5 < 6 bytes")
    svg.line((0, 0), (9, 9), "#222222", dashed=True)
    svg.text(10, 20, "R&D <here>", bold=True, anchor="end", halo="white")
    root = ElementTree.fromstring(svg.as_text())
    assert root.get("role") == "img" and root.get("aria-label") == "A < B"
    assert root.findtext(f"{SVG}desc") == 'Two "bars" & a line.'
    white, bar = root.findall(f"{SVG}rect")
    assert (white.get("width"), white.get("fill")) == ("100", "white")
    assert (bar.get("fill"), bar.findtext(f"{SVG}title")) == ("#332288", "5 < 6 bytes")
    (text,) = root.findall(f"{SVG}text")
    assert (text.text, text.get("text-anchor")) == ("R&D <here>", "end")


@pytest.mark.parametrize("text", ["optimizer states", "14.96 GiB", "mm", "illicit"])
@pytest.mark.parametrize("weight", ["normal", "bold"])
def test_widths_are_those_of_the_font(text: str, weight: str) -> None:
    def right_edge(drawn: str) -> float:
        font = FontProperties(family="DejaVu Sans", weight=weight)
        return float(TextPath((0, 0), drawn, 100, prop=font).vertices[:, 0].max())

    # Between bars: a letter's own edges are not its width.
    width = (right_edge(f"|{text}|") - right_edge("||")) * 12 / 100
    assert text_width(text, 12, bold=weight == "bold") == pytest.approx(width, rel=0.02)


def test_tints_go_from_the_colour_to_white() -> None:
    assert tint("#332288", 0) == "#332288"
    assert tint("#332288", 1) == "#ffffff"
    assert tint("#000000", 0.5) in ("#7f7f7f", "#808080")


def test_a_hatched_rectangle_is_filled_with_a_pattern_that_is_there() -> None:
    svg = Svg(width=100, height=50, title="", description="")
    svg.rectangle(1, 2, 3, 4, HATCHED)
    root = ElementTree.fromstring(svg.as_text())
    bar = root.findall(f"{SVG}rect")[-1]
    (pattern,) = root.iter(f"{SVG}pattern")
    assert bar.get("fill") == f"url(#{pattern.get('id')})"
    assert [rect.get("fill") for rect in pattern] == ["white", "#8A8A8A"]
