"""The roofline."""

from __future__ import annotations

import pytest

from playbook_utils import show
from tests.show.drawn import boxes, flaws

PEAKS = {"FP32": 64e12, "BF16": 1000e12}


def test_kernels_stand_under_the_lowest_roof() -> None:
    kernels = {"slow": 0.5, "also": 8.0, "same": 8.0, "fast": 100.0}
    picture = show.roofline(kernels, peaks=PEAKS, bytes_per_s=4e12, title="Roof")
    assert flaws(picture) == []
    (axes,) = picture.figure.axes
    marks = [line for line in axes.lines if line.get_marker() == "o"]
    places = [(float(m.get_xdata()[0]), float(m.get_ydata()[0])) for m in marks]
    assert places == [(0.5, 2e12), (8.0, 32e12), (100.0, 64e12)]
    said = {text.strip() for text, _ in boxes(picture)}
    assert {"also, same: 8", "slow: 0.5", "4 TB/s", "FP32: 64 TFLOP/s"} <= said
    assert "16 for FP32, 250 for BF16" in picture.description


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intensities": {}}, "intensities"),
        ({"intensities": {"a": 0.0}}, "intensities"),
        ({"peaks": {}}, "peaks"),
        ({"peaks": {"a": -1.0}}, "peaks"),
        ({"bytes_per_s": 0}, "bytes_per_s"),
    ],
)
def test_what_has_no_place_on_a_logarithmic_axis(changes: dict[str, object], message: str) -> None:
    given = {"intensities": {"a": 1.0}, "peaks": PEAKS, "bytes_per_s": 1e12, **changes}
    with pytest.raises(ValueError, match=message):
        show.roofline(given.pop("intensities"), **given)
