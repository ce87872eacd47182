"""The drawing of an H100."""

from __future__ import annotations

from playbook_utils import show
from tests.show.drawn import boxes, flaws


def test_it_is_readable_and_says_the_sizes() -> None:
    picture = show.gpu_diagram()
    assert flaws(picture) == []
    said = " ".join(text for text, _ in boxes(picture))
    assert "132 SMs" in picture.description and "256 KiB" in picture.description
    for part in ("132 SMs", "128 cores", "50 MB", "80 GB", "64 KiB", "256 KiB"):
        assert part in said


def test_as_many_squares_as_there_are_sms_and_cores() -> None:
    axes = show.gpu_diagram().figure.axes[0]
    widths = [patch.get_width() for patch in axes.patches if hasattr(patch, "get_width")]
    assert widths.count(0.4) == 132
    assert widths.count(0.32) == 128
