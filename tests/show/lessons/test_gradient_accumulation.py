"""The drawing of gradient accumulation: a column a microbatch, one step, all texts readable."""

from __future__ import annotations

import pytest
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from playbook_utils import show
from tests.show.drawn import flaws


@pytest.mark.parametrize("num_microbatches", [1, 4, 8])
def test_a_column_per_microbatch_and_one_step(num_microbatches: int) -> None:
    picture = show.accumulation_diagram(num_microbatches)
    (axes,) = picture.figure.axes
    kinds = [type(patch) for patch in axes.patches]
    # slices and activations, then the buffer and the step
    assert kinds.count(FancyBboxPatch) == 2 * num_microbatches + 2
    # down twice in each column, to the next column, and into the step
    assert kinds.count(FancyArrowPatch) == 3 * num_microbatches
    assert flaws(picture) == []
    assert f"over {num_microbatches} microbatches" in repr(picture)


@pytest.mark.parametrize("num_microbatches", [0, 9])
def test_more_microbatches_than_fit_are_refused(num_microbatches: int) -> None:
    with pytest.raises(ValueError, match=f"num_microbatches is {num_microbatches}; expected 1 to"):
        show.accumulation_diagram(num_microbatches)
