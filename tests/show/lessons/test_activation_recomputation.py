"""The drawing of recomputation: what it holds at each moment, and that it can be read."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex

from playbook_utils import show
from playbook_utils.show.style import CATEGORY_COLORS, KIND_COLORS
from tests.show.drawn import flaws


def colored(picture: show.Picture, name: str) -> int:
    """Boxes in the colour of a kind or a category."""
    color = {**KIND_COLORS, **CATEGORY_COLORS}[name].lower()
    (axes,) = picture.figure.axes
    return sum(to_hex(patch.get_facecolor()) == color for patch in axes.patches)


@pytest.mark.parametrize(("layers", "segments"), [(6, 3), (2, 2), (12, 4), (12, 12)])
def test_each_moment_holds_what_it_must(layers: int, segments: int) -> None:
    picture = show.recomputation_diagram(layers, segments)
    size = layers // segments
    # row by row: insides held, and inputs held
    held = [layers + layers, segments]
    held += 2 * [size + segments - 1 + size]
    held += [size + segments - 2 + size]
    assert colored(picture, "activations") == sum(held)
    assert colored(picture, "forward") == 2 * layers + 2 * size
    assert colored(picture, "backward") == size
    assert flaws(picture) == []
    assert f"{layers} layers in {segments} segments" in repr(picture)


@pytest.mark.parametrize("sizes", [(1, 1), (13, 13), (6, 4), (6, 1), (6, 0)])
def test_what_cannot_be_drawn_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="expected 2"):
        show.recomputation_diagram(*sizes)
