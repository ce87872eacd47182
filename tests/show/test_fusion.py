"""The drawing of fusion: two arrows a kernel, and it can be read."""

from __future__ import annotations

import pytest
from matplotlib.patches import FancyArrowPatch

from playbook_utils import show
from tests.show.drawn import flaws, texts


@pytest.mark.parametrize("count", [2, 5, 7])
def test_two_arrows_a_kernel(count: int) -> None:
    names = [f"operator {i}"[: 30 // count] + str(i) for i in range(count)]
    picture = show.fusion_diagram(names)
    (axes,) = picture.figure.axes
    arrows = [patch for patch in axes.patches if isinstance(patch, FancyArrowPatch)]
    assert len(arrows) == 2 * (count + 1)
    shown = [text.get_text() for text in texts(picture)]
    assert all(name in shown for name in names) and "   ".join(names) in shown
    assert flaws(picture) == []
    assert f"{count} kernels" in repr(picture)


@pytest.mark.parametrize("count", [0, 1, 8])
def test_what_does_not_fit_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="expected 2 to 7"):
        show.fusion_diagram(["x"] * count)
