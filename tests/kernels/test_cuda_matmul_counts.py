"""What each rung of the matmul ladder costs, by formula, and that it improves on the rung below.

The formulas are derived from the kernels' index arithmetic, the sectors of odd sizes from an
independent walk over it (`walked_sectors`); nothing here is copied from a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.kernels.cuda_cases import (
    COALESCED,
    COARSENED,
    CONFLICT_FREE,
    LADDER,
    NAIVE,
    TILED,
    VECTORISED,
    Rung,
    ceil_div,
)

LANES = 32
FLOATS_PER_SECTOR = 8
EVEN = (128, 64, 96)
"""M, N, K that every rung divides into whole tiles."""
ODD = (37, 45, 29)


def padded(size: int, multiple: int) -> int:
    return ceil_div(size, multiple) * multiple


def loads_by_tiles(m: int, n: int, k: int, side: int) -> int:
    """Elements fetched: A once for each column of blocks, B once for each row of blocks."""
    return m * k * ceil_div(n, side) + k * n * ceil_div(m, side)


@pytest.mark.parametrize(
    ("rung", "a_sectors", "b_sectors", "c_sectors"),
    [(NAIVE, 32, 1, 32), (COALESCED, 1, 4, 4)],
    ids=["naive", "coalesced"],
)
def test_sectors_a_request_follow_from_who_sits_beside_whom(
    rung: Rung, a_sectors: int, b_sectors: int, c_sectors: int
) -> None:
    m, n, k = EVEN
    report = rung.count(m, n, k)
    assert (report.global_loads, report.global_stores) == (2 * m * n * k, m * n)
    requests = m * n * k // LANES  # to A; as many to B
    assert report.load_requests == 2 * requests
    assert report.load_sectors == (a_sectors + b_sectors) * requests
    assert report.sectors_per_load_request == (a_sectors + b_sectors) / 2
    assert report.store_sectors == c_sectors * m * n // LANES
    assert report.shared_loads == report.shared_stores == 0


def walked_sectors(m: int, n: int, k: int, *, rows_first: bool) -> tuple[int, int]:
    """(load sectors, store sectors) of 04 or 05: every warp and step, by sets of addresses."""
    loads = stores = 0
    for across in range(0, m if rows_first else n, 32):
        for other in range(n if rows_first else m):
            lanes = range(across, min(across + 32, m if rows_first else n))
            places = [(i, other) if rows_first else (other, i) for i in lanes]
            for step in range(k):
                loads += len({(row * k + step) // FLOATS_PER_SECTOR for row, _ in places})
                loads += len({(step * n + col) // FLOATS_PER_SECTOR for _, col in places})
            stores += len({(row * n + col) // FLOATS_PER_SECTOR for row, col in places})
    return loads, stores


@pytest.mark.parametrize(("rung", "rows_first"), [(NAIVE, True), (COALESCED, False)])
def test_sectors_at_odd_sizes(rung: Rung, rows_first: bool) -> None:
    m, n, k = ODD
    report = rung.count(m, n, k)
    assert (report.global_loads, report.global_stores) == (2 * m * n * k, m * n)
    assert (report.load_sectors, report.store_sectors) == walked_sectors(
        m, n, k, rows_first=rows_first
    )


@pytest.mark.parametrize("tile", [8, 16, 32])
def test_tiling_divides_global_loads_by_the_tile(tile: int) -> None:
    m, n, k = EVEN
    rung = replace(TILED, block=(tile, tile), side=tile, defines={"TILE": tile})
    report = rung.count(m, n, k)
    assert report.global_loads == 2 * m * n * k // tile
    # A row of the tile is `tile` floats side by side; a warp brings 32 / tile of them: always
    # 32 floats in 4 sectors, none of it unused.
    assert report.sectors_per_load_request == 4
    assert report.bytes_moved == report.bytes_loaded + report.bytes_stored
    assert report.shared_loads == 2 * m * n * k
    assert report.shared_stores == report.global_loads
    assert report.bank_conflicts == 0


def test_coarsening_divides_global_and_shared_loads() -> None:
    m, n, k = EVEN
    report = COARSENED.count(m, n, k)
    assert report.global_loads == 2 * m * n * k // (16 * 4)
    assert report.shared_loads == 2 * m * n * k // 4
    assert report.sectors_per_load_request == 4
    assert report.bank_conflicts == 0


@pytest.mark.parametrize("rung", [VECTORISED, CONFLICT_FREE], ids=lambda rung: rung.kernel)
def test_vectors_ask_for_the_same_bytes_in_a_quarter_of_the_requests(rung: Rung) -> None:
    m, n, k = EVEN
    report = rung.count(m, n, k)
    elements = 2 * m * n * k // 64
    assert report.bytes_loaded == 4 * elements
    assert report.global_loads == elements // 4
    assert report.load_requests == elements // 4 // LANES
    assert report.sectors_per_load_request == 16  # 32 lanes x 16 bytes
    assert report.global_stores == m * n // 4
    assert report.shared_loads == 2 * m * n * k // 4 // 4
    assert report.bytes_moved == report.bytes_loaded + report.bytes_stored


@pytest.mark.parametrize("rung", [VECTORISED, CONFLICT_FREE], ids=lambda rung: rung.kernel)
def test_vectors_need_rows_of_4_floats_and_no_more(rung: Rung) -> None:
    fours, odd = (65, 36, 20), (65, 35, 19)
    assert rung.count(*fours).global_loads == loads_by_tiles(*fours, 64) // 4
    assert rung.count(*odd).global_loads == loads_by_tiles(*odd, 64)


@pytest.mark.parametrize("rung", LADDER[2:], ids=lambda rung: rung.kernel)
@pytest.mark.parametrize("shape", [ODD, (65, 36, 20)], ids=str)
def test_bytes_at_odd_sizes(rung: Rung, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    report = rung.count(m, n, k)
    assert report.bytes_loaded == 4 * loads_by_tiles(m, n, k, rung.side)
    assert report.bytes_stored == 4 * m * n
    tile = rung.block[0]
    area = padded(m, rung.side) * padded(n, rung.side) * padded(k, tile)
    multiplications_a_load = {TILED.kernel: 1, COARSENED.kernel: 4}.get(rung.kernel, 16)
    assert report.shared_loads == 2 * area // multiplications_a_load


def transposed_store_conflicts(m: int, n: int, k: int, tile: int, degree: int) -> int:
    """Extra steps when each of the 4 stores of a warp into A's tile takes `degree` steps."""
    side = 4 * tile
    slabs = ceil_div(m, side) * ceil_div(n, side) * ceil_div(k, tile)
    return slabs * (tile * tile // LANES) * 4 * (degree - 1)


@pytest.mark.parametrize(
    ("rung", "defines", "tile", "degree"),
    [
        # TILE / 4 groups of rows of a warp start in the same bank.
        (VECTORISED, {"TILE": 8}, 8, 2),
        (VECTORISED, {"TILE": 16}, 16, 4),
        (VECTORISED, {"TILE": 32}, 32, 8),
        # A pitch of 68 floats: 4 steps of k are 272 floats, 16 banks further, and 32 the next.
        (VECTORISED, {"TILE": 16, "PAD": 4}, 16, 2),
        (VECTORISED, {"TILE": 16, "PAD": 8}, 16, 4),
        (CONFLICT_FREE, {"TILE": 8}, 8, 1),
        (CONFLICT_FREE, {"TILE": 16}, 16, 1),
        (CONFLICT_FREE, {"TILE": 32}, 32, 1),
    ],
)
@pytest.mark.parametrize("shape", [EVEN, ODD], ids=str)
def test_bank_conflicts(
    rung: Rung, defines: dict[str, int], tile: int, degree: int, shape: tuple[int, int, int]
) -> None:
    rung = replace(rung, block=(tile, tile), side=4 * tile, defines=defines)
    report = rung.count(*shape)
    assert report.bank_conflicts == transposed_store_conflicts(*shape, tile, degree)
    assert report.conflict_degree == degree


IMPROVEMENTS: list[tuple[Rung, Rung, str, Callable[..., float], float]] = [
    (NAIVE, COALESCED, "sectors a request", lambda r: r.sectors_per_load_request, 16.5 / 2.5),
    (COALESCED, TILED, "global loads", lambda r: r.global_loads, 16),
    (TILED, COARSENED, "shared loads", lambda r: r.shared_loads, 4),
    (TILED, COARSENED, "global loads", lambda r: r.global_loads, 4),
    (COARSENED, VECTORISED, "load requests", lambda r: r.load_requests, 4),
    (COARSENED, VECTORISED, "shared loads", lambda r: r.shared_loads, 4),
]


@pytest.mark.parametrize(
    ("below", "above", "what", "counter", "factor"),
    IMPROVEMENTS,
    ids=[f"{above.kernel}-{what}" for _, above, what, _, _ in IMPROVEMENTS],
)
def test_each_rung_improves_on_the_one_below(
    below: Rung, above: Rung, what: str, counter: Callable[..., float], factor: float
) -> None:
    assert counter(below.count(*EVEN)) == factor * counter(above.count(*EVEN))


def test_no_rung_moves_more_bytes_than_the_one_below() -> None:
    moved = [rung.count(*EVEN).bytes_moved for rung in LADDER]
    naive, coalesced, tiled, coarsened, vectorised, conflict_free = moved
    assert naive > coalesced > tiled > coarsened == vectorised == conflict_free


def test_vectors_save_instructions_but_no_steps_of_shared_memory() -> None:
    """A float4 of 32 lanes is 512 bytes, and the banks deliver 128 at a time."""
    coarsened, conflict_free = COARSENED.count(*EVEN), CONFLICT_FREE.count(*EVEN)
    assert conflict_free.shared_requests < coarsened.shared_requests
    assert conflict_free.shared_wavefronts == coarsened.shared_wavefronts


def test_the_last_rung_removes_what_the_vectors_cost() -> None:
    vectorised, conflict_free = VECTORISED.count(*EVEN), CONFLICT_FREE.count(*EVEN)
    assert vectorised.bank_conflicts > 0 == conflict_free.bank_conflicts
    saved = vectorised.shared_wavefronts - conflict_free.shared_wavefronts
    assert saved == vectorised.bank_conflicts
