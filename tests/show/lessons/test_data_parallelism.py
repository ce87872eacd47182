"""Replicas and slices, drawn: a column a rank, every sample in one box."""

from __future__ import annotations

from itertools import pairwise

import pytest
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from playbook_utils import show
from tests.show.drawn import flaws


@pytest.mark.parametrize("world_size", [1, 4, 8])
def test_data_parallelism_has_a_column_per_rank(world_size: int) -> None:
    picture = show.data_parallel_diagram(world_size)
    (axes,) = picture.figure.axes
    kinds = [type(patch) for patch in axes.patches]
    assert kinds.count(FancyBboxPatch) == 4 * world_size + 1
    assert kinds.count(FancyArrowPatch) == 4 * world_size
    assert flaws(picture) == []
    assert f"on {world_size} ranks" in repr(picture)


@pytest.mark.parametrize("world_size", [0, 9])
def test_more_ranks_than_fit_are_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"world_size is {world_size}; expected 1 to 8"):
        show.data_parallel_diagram(world_size)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 2, 4), (16384, 8, 8)])
def test_every_sample_of_the_batch_is_in_one_box(sizes: tuple[int, int, int]) -> None:
    picture = show.batch_split(*sizes)
    (axes,) = picture.figure.axes
    ranges = [
        t.get_text().replace(",", "").replace("\n", "")
        for t in axes.texts
        if t.get_text()[0].isdigit()
    ]
    ends = sorted(tuple(int(n) for n in (r.split("-") * 2)[:2]) for r in ranges)
    assert ends[0][0] == 0 and ends[-1][1] == sizes[0] * sizes[1] * sizes[2] - 1
    assert all(b[0] == a[1] + 1 for a, b in pairwise(ends))
    assert len(ends) == sizes[1] * sizes[2]
    assert flaws(picture) == []
    with pytest.raises(ValueError, match="grad_accumulation is 9; expected 1 to 8"):
        show.batch_split(1, 9, 1)
