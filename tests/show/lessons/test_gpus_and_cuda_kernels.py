"""Who took which element, and what a warp asked for."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from playbook_utils import show
from playbook_utils.show.style import KIND_COLORS, rank_color
from tests.show.drawn import boxes, flaws

BLOCK = [[y // 4 * 3 + x // 8 for x in range(24)] for y in range(8)]
THREAD = [[y % 4 * 8 + x % 8 for x in range(24)] for y in range(8)]


def cells(picture: show.Picture, panel: int = 0) -> list[Rectangle]:
    patches = picture.figure.axes[panel].patches
    return [p for p in patches if isinstance(p, Rectangle) and p.get_width() == 1]


def test_elements_have_their_blocks_color_and_their_threads_number() -> None:
    picture = show.thread_grid(BLOCK, THREAD, shape=(6, 20))
    assert flaws(picture) == []
    by_place = {(cell.get_y(), cell.get_x()): cell for cell in cells(picture)}
    assert len(by_place) == 8 * 24
    assert to_hex(by_place[5, 9].get_facecolor()) == rank_color(4).lower()
    assert to_hex(by_place[5, 20].get_facecolor()) == "#ffffff"
    assert sorted(text for text, _ in boxes(picture)) == sorted(
        str(n) for row in THREAD for n in row
    )
    assert "6 blocks" in picture.description and "72 of 192" in picture.description


def test_second_warp_of_a_block_is_paler() -> None:
    picture = show.thread_grid([[0] * 8] * 8, [[8 * y + x for x in range(8)] for y in range(8)],
                               shape=(8, 8))  # fmt: skip
    alphas = [cell.get_alpha() for cell in cells(picture)]
    assert alphas == [1] * 32 + [0.55] * 32


@pytest.mark.parametrize(
    ("block", "thread", "message"),
    [
        ([], [], "0 x 0 cells"),
        ([[0] * 41], [[0] * 41], "1 x 41 cells"),
        ([[0, 0], [0]], [[0, 0], [0, 0]], "2 rows of 2"),
        ([[0, 0]], [[0, 0], [0, 0]], "1 rows of 2"),
    ],
)
def test_grids_that_cannot_be_drawn(
    block: list[list[int]], thread: list[list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        show.thread_grid(block, thread, shape=(1, 1))


def test_sectors_are_moved_whole() -> None:
    wanted = {
        "a column": [32 * i + 5 for i in range(32)],
        "one": [200] * 32,
        "a row": range(64, 96),
    }
    picture = show.requests(wanted, row_length=32, num_rows=32)
    assert flaws(picture) == []
    assert [len(cells(picture, panel)) for panel in range(3)] == [256, 8, 32]
    dark = [
        c for c in cells(picture) if to_hex(c.get_facecolor()) == KIND_COLORS["backward"].lower()
    ]
    assert {(c.get_y(), c.get_x()) for c in dark} == {(i, 5) for i in range(32)}
    for said in ("a column: 32 sectors, 1,024 bytes moved, 128 wanted", "one: 1 sector, 32 bytes",
                 "a row: 4 sectors, 128 bytes moved, 128 wanted"):  # fmt: skip
        assert said in picture.description


@pytest.mark.parametrize(
    ("wanted", "message"),
    [({}, "no requests"), ({"a": []}, "'a' wants"), ({"a": [64]}, "0 to 63"), ({"a": [-1]}, "-1")],
)
def test_requests_that_cannot_be_drawn(wanted: dict[str, list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        show.requests(wanted, row_length=8, num_rows=8)


def test_the_gpu_is_readable_and_says_the_sizes() -> None:
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
