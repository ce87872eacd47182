"""Fusion: two arrows a kernel. Programs and lanes: each offset once, masked ones white."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex
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
def test_operators_that_do_not_fit_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="expected 2 to 7"):
        show.fusion_diagram(["x"] * count)


@pytest.mark.parametrize(("size", "block"), [(20, 8), (1, 2), (64, 8), (31, 32), (100, 16)])
def test_each_lane_has_its_offset_and_its_program(size: int, block: int) -> None:
    picture = show.program_lanes(size, block)
    programs = -(-size // block)
    (axes,) = picture.figure.axes
    colors = [to_hex(patch.get_facecolor()) for patch in axes.patches]
    expected = [
        show.rank_color(offset // block).lower() if offset < size else "#ffffff"
        for offset in range(programs * block)
    ]
    assert colors == expected
    shown = [text.get_text() for text in texts(picture)]
    assert sorted(t for t in shown if t.isdigit()) == sorted(map(str, range(programs * block)))
    assert flaws(picture) == []
    assert f"{programs * block - size} lanes of the last program are masked" in repr(picture)


@pytest.mark.parametrize("sizes", [(0, 8), (20, 1), (20, 33), (65, 8)])
def test_lanes_that_do_not_fit_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        show.program_lanes(*sizes)
