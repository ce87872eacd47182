"""Colours that everyone can tell apart, and pictures that are the same bytes every time."""

from __future__ import annotations

import io
from itertools import combinations

import matplotlib
import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter
from matplotlib.colors import to_rgb
from PIL import Image

from playbook_utils import show
from playbook_utils.show.style import (
    CATEGORY_COLORS,
    KIND_COLORS,
    RANK_COLORS,
    color_of,
    rank_color,
    text_color_on,
)

# Simulation of full colour blindness in linear RGB (Machado, Oliveira, Fernandes 2009, table 1).
SIMULATED = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
}
RGB_TO_XYZ = np.array(
    [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
)


def linear(color: str) -> np.ndarray:
    rgb = np.array(to_rgb(color))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(color: str, eye: str) -> np.ndarray:
    """CIE L*a*b* (D65) of a colour as this eye sees it."""
    seen = np.clip(SIMULATED[eye] @ linear(color), 0, 1)
    x, y, z = np.cbrt(RGB_TO_XYZ @ seen / np.array([0.9505, 1.0, 1.089]) + 1e-9)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eye", SIMULATED)
@pytest.mark.parametrize(
    "colors",
    [KIND_COLORS.values(), CATEGORY_COLORS.values(), RANK_COLORS],
    ids=["kinds", "categories", "ranks"],
)
def test_colours_stay_apart_for_every_eye(colors, eye: str) -> None:
    """A distance of 10 in L*a*b* is about four just noticeable differences."""
    closest = min(
        (float(np.linalg.norm(lab(a, eye) - lab(b, eye))), a, b) for a, b in combinations(colors, 2)
    )
    assert closest[0] > 10, closest


@pytest.mark.parametrize("color", [*KIND_COLORS.values(), *CATEGORY_COLORS.values(), *RANK_COLORS])
def test_text_on_a_colour_has_the_better_contrast(color: str) -> None:
    def luminance(c: str) -> float:
        return float(np.array([0.2126, 0.7152, 0.0722]) @ linear(c))

    lighter, darker = sorted([luminance(color), luminance(text_color_on(color))], reverse=True)
    # WCAG 2 asks 3:1 of large text and graphics.
    assert (lighter + 0.05) / (darker + 0.05) > 3


def test_one_colour_by_meaning() -> None:
    assert color_of("grads", 3) == CATEGORY_COLORS["grads"]
    assert color_of("communication") == KIND_COLORS["communication"]
    assert color_of("rank 11") == rank_color(11) == rank_color(3)
    assert CATEGORY_COLORS["optimizer_states"] == KIND_COLORS["optimizer"]


def draw() -> show.Picture:
    return show.lines({"a": ([0, 1], [0, 1])}, xlabel="x", ylabel="y", title="T")


def test_the_same_data_give_the_same_bytes_without_a_version_or_a_date() -> None:
    first = draw()
    matplotlib.rcParams.update({"font.size": 30, "axes.facecolor": "black"})
    try:
        assert draw().png == first.png
        assert matplotlib.rcParams["axes.facecolor"] == "black"
    finally:
        matplotlib.rcdefaults()
    assert Image.open(io.BytesIO(first.png)).info.keys() <= {"dpi"}


def test_a_picture_is_opaque_and_white_and_shown_900_pixels_wide() -> None:
    picture = draw()
    image = Image.open(io.BytesIO(picture.png)).convert("RGBA")
    assert image.getpixel((0, 0)) == image.getpixel((image.width - 1, 0)) == (255, 255, 255, 255)
    data, metadata = DisplayFormatter().format(picture)
    assert data["image/png"] == picture.png and metadata["image/png"] == {"width": 900}
    assert data["text/plain"] == repr(picture) == picture.description
    assert set(data) == {"image/png", "text/plain"}
