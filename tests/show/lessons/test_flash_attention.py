"""The drawing of the tiles of attention: what it says, what colours it uses, what it refuses."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import FancyBboxPatch

from playbook_utils import show
from playbook_utils.show.style import KIND_COLORS, Picture


def colors(picture: Picture) -> Counter[str]:
    patches = picture.figure.axes[0].patches
    return Counter(
        to_hex(p.get_facecolor()).upper() for p in patches if isinstance(p, FancyBboxPatch)
    )


CAUSAL = [
    ["full" if j < i else "masked" if j == i else "skipped" for j in range(3)] for i in range(3)
]


def test_counts_are_in_the_words() -> None:
    picture = show.attention_tiles(CAUSAL)
    assert picture.description == (
        "3 x 3 tiles of scores, blocks of queries by blocks of keys: 3 computed, 3 computed and "
        "masked, 3 skipped."
    )


def test_each_kind_has_its_colour_and_a_line_in_the_key() -> None:
    found = colors(show.attention_tiles(CAUSAL))
    assert found[KIND_COLORS["compute"].upper()] == 3 + 1
    assert found[KIND_COLORS["idle"].upper()] == 3 + 1
    assert found["#88CCEE"] == 3 + 1
    assert KIND_COLORS["communication"].upper() not in found and "#DDCC77" not in found


def test_what_is_done_and_what_is_to_come_differ() -> None:
    picture = show.attention_tiles(CAUSAL, current=(1, 0))
    found = colors(picture)
    assert found["#88CCEE"] == 1 + 1  # the first row's, done; the others come later
    assert found["#DDCC77"] == 4 + 1
    assert found[KIND_COLORS["idle"].upper()] == 3 + 1  # skipped is skipped, early or late
    assert "1 computed and masked, 3 skipped, 4 still to compute." in picture.description


def test_what_is_in_hand_stands_out() -> None:
    picture = show.attention_tiles([["full"] * 4] * 2, current=(1, 3))
    # the tile, Q, O, the keys and values, and the key
    assert colors(picture)[KIND_COLORS["communication"].upper()] == 5
    assert picture.description.endswith(
        "the tile of queries 2 and keys 4, with Q 2, K 4, V 4 and O 2."
    )


@pytest.mark.parametrize(
    ("kinds", "current", "said"),
    [
        ([], None, "0 rows"),
        ([["full"], ["full", "full"]], None, "of one length"),
        ([["full"] * 17], None, "make the blocks larger"),
        ([["full", "half"]], None, "['half']"),
        ([["full"]], (0, 1), "expected a tile of 1 x 1"),
    ],
)
def test_refuses(kinds: list[list[str]], current: tuple[int, int] | None, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        show.attention_tiles(kinds, current=current)
