"""The drawing of a training step: what is there when, and that it can be read."""

from __future__ import annotations

import numpy as np

from playbook_utils import show
from playbook_utils.show.style import CATEGORY_COLORS
from tests.show.drawn import flaws


def held(picture: show.Picture) -> dict[str, np.ndarray]:
    """Corners of what is filled, by category."""
    (axes,) = picture.figure.axes
    names = {color.lower(): name for name, color in CATEGORY_COLORS.items()}
    found = {}
    for patch in axes.patches:
        color = "#" + "".join(f"{round(255 * part):02x}" for part in patch.get_facecolor()[:3])
        if color in names and hasattr(patch, "get_xy") and np.ndim(patch.get_xy()) == 2:
            found[names[color]] = patch.get_xy()
    return found


def test_texts_neither_overlap_nor_leave() -> None:
    assert flaws(show.training_step()) == []


def test_each_kind_is_there_when_it_should_be() -> None:
    first = held(show.training_step())
    assert set(first) == {"params", "grads", "optimizer_states", "activations"}

    def share_at(corners: np.ndarray, x: float) -> float:
        ground = corners[:, 1].max()
        before = [ground - y for place, y in corners[1:-2] if place <= x]
        return round(float(before[-1] / 1.1), 2) if before else 0.0

    starts, turns, steps, ends = 2.61, 6.2, 10.7, 13.39
    assert [share_at(first["activations"], x) for x in (starts, turns, steps)] == [0, 1, 0]
    assert [share_at(first["grads"], x) for x in (turns + 0.1, steps, ends)] == [0, 1, 1]
    assert [share_at(first["optimizer_states"], x) for x in (starts, steps, ends)] == [0, 0, 1]
    assert [share_at(first["params"], x) for x in (starts, ends - 0.01)] == [1, 1]
