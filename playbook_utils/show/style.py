"""The one hand that draws: colours by meaning, type sizes, and the finished picture.

Colours come from the palettes of Okabe and Ito (jfly.uni-koeln.de/color) and Paul Tol ("muted",
personal.sron.nl/~pault), chosen to stay apart for colour-blind eyes. Figures have an opaque white
background, so that they read the same on a light and on a dark page, and are made without pyplot:
there is no current figure, nothing to close and nothing that is displayed twice.

    with new_figure("Loss", height_in=3.5) as (figure, axes):
        axes.plot(steps, losses, color=color_of("forward"))
        picture = Picture(figure, "The loss falls from 5.5 to 2.1 in 50 steps.")
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, cast

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image

__all__ = [
    "CATEGORY_COLORS", "INK", "KIND_COLORS", "QUIET", "RANK_COLORS", "WIDTH_IN",
    "Picture", "color_key", "color_of", "house_style", "new_figure", "rank_color", "text_color_on",
]  # fmt: skip

KIND_COLORS: Mapping[str, str] = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "optimizer": "#CC79A7",
    "compute": "#00695C",
    "communication": "#D55E00",
    "gather": "#E69F00",
    "scatter": "#661100",
    "idle": "#E4E4E4",
}
"""Colour of each kind of `Span`; "gather" and "scatter" are communication told apart."""

CATEGORY_COLORS: Mapping[str, str] = {
    "params": "#332288",
    "grads": "#E69F00",
    "optimizer_states": "#CC79A7",
    "activations": "#009E73",
    "other": "#BBBBBB",
}
"""Colour of each category of memory, in the order in which they are stacked."""

RANK_COLORS: Sequence[str] = (
    *("#88CCEE", "#117733", "#DDCC77", "#882255"),
    *("#44AA99", "#CC6677", "#999933", "#AA4499"),
)
"""Colours of ranks 0 to 7; rank 8 has that of rank 0 again."""

INK = "#222222"
"""Colour of text and marks."""
QUIET = "#8A8A8A"
"""Colour of axes, limits and side remarks."""
WIDTH_IN = 9.0
"""Width of a figure; shown 900 pixels wide."""

_PIXELS_PER_INCH = 144
_SHOWN_PIXELS_PER_INCH = 100
_STYLE: dict[str, Any] = {
    "axes.edgecolor": QUIET,
    "axes.grid": False,
    "axes.labelcolor": INK,
    "axes.labelsize": 10,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "figure.dpi": _PIXELS_PER_INCH,
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "legend.fontsize": 9.5,
    "lines.linewidth": 2.0,
    "text.color": INK,
    "xtick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.color": QUIET,
    "ytick.labelcolor": INK,
}


class Picture:
    """A finished figure: displayed as a PNG, with a description in words as its text.

    The description is what screen readers, terminals and text diffs get. It is compared when a
    notebook is tested, so it holds no measured times. The same data give the same bytes.
    """

    def __init__(self, figure: Figure, description: str) -> None:
        self.figure = figure
        self.description = description

    @cached_property
    def png(self) -> bytes:
        """The figure as a PNG file."""
        drawn, written = io.BytesIO(), io.BytesIO()
        with house_style():
            self.figure.savefig(drawn, format="png")
        # 256 colours: a third of the size in a stored notebook. No version, no time: equal bytes.
        image = Image.open(drawn).convert("RGB")
        image.quantize(256, dither=Image.Dither.NONE, kmeans=1).save(written, "png", optimize=True)
        return written.getvalue()

    def __repr__(self) -> str:
        return self.description

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        width = round(self.figure.get_size_inches()[0] * _SHOWN_PIXELS_PER_INCH)
        data = {"image/png": self.png, "text/plain": self.description}
        return data, {"image/png": {"width": width}}


@contextmanager
def house_style() -> Iterator[None]:
    """Matplotlib's own defaults and then ours, whatever the notebook has set; restored after."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(cast(Any, _STYLE))
        yield


@contextmanager
def new_figure(
    title: str, *, height_in: float, width_in: float = WIDTH_IN
) -> Iterator[tuple[Figure, Axes]]:
    """An empty figure with one pair of axes, to be filled in the block, in house style."""
    with house_style():
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_title(title)
        yield figure, axes


def rank_color(rank: int) -> str:
    """The colour of a rank."""
    return RANK_COLORS[rank % len(RANK_COLORS)]


def color_of(name: str, position: int = 0) -> str:
    """The colour that `name` has everywhere: a kind, a category, or "rank 3".

    Names without a meaning of their own take the colour of their `position`.
    """
    if match := re.fullmatch(r"rank (\d+)", name):
        return rank_color(int(match.group(1)))
    named = {**KIND_COLORS, **CATEGORY_COLORS, "for a moment": CATEGORY_COLORS["other"]}
    return named.get(name) or RANK_COLORS[position % len(RANK_COLORS)]


def text_color_on(background: str) -> str:
    """White or ink, whichever reads better on `background` (relative luminance of WCAG 2)."""
    rgb = to_rgb(background)
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "white" if luminance < 0.24 else INK


def color_key(axes: Axes, colors: Mapping[str, str]) -> None:
    """One line above the axes that says which colour is what, for marks too small to label."""
    if title := axes.get_title(loc="left"):
        axes.set_title(title, pad=26)
    patches = [Patch(facecolor=c, label=name.replace("_", " ")) for name, c in colors.items()]
    axes.legend(
        handles=patches,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.3,
        ncols=len(patches),
        frameon=False,
        handlelength=1.0,
        handletextpad=0.4,
        columnspacing=1.2,
    )
