"""The drawing of programs and lanes: each offset once, masked ones white, and it can be read."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex

from playbook_utils import show
from tests.show.drawn import flaws, texts


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
def test_what_does_not_fit_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        show.program_lanes(*sizes)
