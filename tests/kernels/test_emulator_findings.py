"""Undefined values, waits that never end, bounds; and races listed while the kernel goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import RaceError, load
from kernels.errors import KernelTimeout, OutOfBoundsError, UnwrittenError, WarpError

SOURCE = """
extern "C" __global__ void nobody_writes(float* c) {
    __shared__ float values[32];
    __syncthreads();
    c[threadIdx.x] = values[threadIdx.x];
}
extern "C" __global__ void one_missing(float* c, int missing) {
    __shared__ float values[32];
    if (threadIdx.x != missing) values[threadIdx.x] = 1.0f;
    __syncthreads();
    c[threadIdx.x] = values[31 - threadIdx.x];
}
extern "C" __global__ void bytes_missing(float* c, int missing) {
    __shared__ unsigned char marks[32];
    __shared__ short halves[32];
    if (threadIdx.x != missing) marks[threadIdx.x] = 1;
    halves[threadIdx.x] = 2;
    __syncthreads();
    c[threadIdx.x] = marks[31 - threadIdx.x] + halves[31 - threadIdx.x];
}
extern "C" __global__ void of_the_block_before(float* c) {
    __shared__ float value;
    if (blockIdx.x == 0 && threadIdx.x == 0) value = 1.0f;
    __syncthreads();
    c[32 * blockIdx.x + threadIdx.x] = value;
}
extern "C" __global__ void counted_from_nothing(int* c) {
    __shared__ int counter;
    atomicAdd(&counter, 1);
    __syncthreads();
    c[threadIdx.x] = counter;
}
extern "C" __global__ void exchanged_first(int* c) {
    __shared__ int counter;
    if (threadIdx.x == 0) atomicExch(&counter, 0);
    __syncthreads();
    atomicAdd(&counter, 1);
    __syncthreads();
    c[threadIdx.x] = counter;
}
extern "C" __global__ void index_from_nothing(float* c) {
    __shared__ int where[32];
    __syncthreads();
    c[where[threadIdx.x]] = 1.0f;
}
extern "C" __global__ void dynamic(float* c, int n) {
    extern __shared__ float staged[];
    if (threadIdx.x < n) staged[threadIdx.x] = 1.0f;
    __syncthreads();
    c[threadIdx.x] = staged[threadIdx.x];
}

extern "C" __global__ void shuffle(float* c, int live, unsigned mask) {
    float v = threadIdx.x;
    if (threadIdx.x < live) v = __shfl_down_sync(mask, v, 1);
    c[threadIdx.x] = v;
}
extern "C" __global__ void shuffle_of_ended(float* c) {
    if (threadIdx.x >= 8) return;
    c[threadIdx.x] = __shfl_sync(0xffffffffu, 1.0f, threadIdx.x + 1);
}
extern "C" __global__ void tail(float* c, int live) {
    if (threadIdx.x < live) {
        unsigned mask = __activemask();
        float v = threadIdx.x;
        for (int half = 16; half > 0; half /= 2) v += __shfl_xor_sync(mask, v, half);
        c[threadIdx.x] = v;
    }
}
extern "C" __global__ void not_in_sync(float* c) {
    if (threadIdx.x < 20) __syncwarp(0xffffu);
    c[threadIdx.x] = 1.0f;
}

extern "C" __global__ void grid_barrier(int* c, volatile int* flag, int wanted) {
    __threadfence();
    if (threadIdx.x == 0) {
        atomicAdd(c, 1);
        while (atomicAdd(c, 0) < wanted) {}
    }
    __syncthreads();
    if (threadIdx.x == 0) c[1] = 1;
}
extern "C" __global__ void volatile_flag(int* c, volatile int* flag, int wanted) {
    while (*flag < wanted) {
        if (c[0] > 0) break;
    }
}
extern "C" __global__ void patient(int* c, volatile int* flag, int wanted) {
    int tries = 0;  // counts its attempts, and gives up
    while (*flag < wanted && tries < 30000) ++tries;
    c[threadIdx.x] = tries;
}
extern "C" __global__ void other_warp(int* c, volatile int* flag, int wanted) {
    if (threadIdx.x < 32) {
        while (atomicAdd(c, 0) == 0) {}
        if (threadIdx.x == 0) atomicAdd(c, 1);
    } else {
        int work = 0;
        for (int i = 0; i < wanted; ++i) work += *flag + 1;
        if (threadIdx.x == 32) atomicAdd(c, work / wanted);
        while (atomicAdd(c, 0) < 2) {}
    }
}

extern "C" __global__ void __launch_bounds__(2 * WARP, 1) bounded(float* c) { c[threadIdx.x] = 1; }
extern "C" __global__ __launch_bounds__(MOST)
    void bounded_by_macro(float* c) { c[threadIdx.x] = 1.0f; }
extern "C" __global__ void free_size(float* c) { c[threadIdx.x] = 1.0f; }

extern "C" __global__ void many_races(float* c, float* d) {
    __shared__ float values[64];
    int t = threadIdx.x;
    values[t] = t;
    c[t] = values[t ^ 1];
    c[t] += values[t ^ 32];
    __syncthreads();
    d[0] = 1.0f;
    d[1] = t;
}
"""


@pytest.fixture(scope="module")
def module() -> Any:
    return load(source=SOURCE, device="cpu", defines={"WARP": 32, "MOST": "(WARP + 8)"})


@pytest.fixture(scope="module")
def listing() -> Any:
    return load(
        source=SOURCE, device="cpu", defines={"WARP": 32, "MOST": "(WARP + 8)"}, races="list"
    )


def line_of(text: str) -> int:
    """Number of the first line of the source with that text."""
    return next(n for n, line in enumerate(SOURCE.split("\n"), start=1) if text in line)


def test_shared_memory_that_nobody_writes_is_named(module: Any) -> None:
    """The compiler knows that too, and would take the array for zeros."""
    with pytest.raises(UnwrittenError) as error:
        module.nobody_writes[1, 32](torch.zeros(32))
    text = "c[threadIdx.x] = values[threadIdx.x];"
    assert str(error.value) == (
        "kernel nobody_writes, block (0, 0, 0), thread (0, 0, 0) reads values[0], shared memory "
        f"that no thread of the block has written: source.cu:{line_of(text)} ({text})"
    )


@pytest.mark.parametrize(
    ("kernel", "array"), [("one_missing", "values"), ("bytes_missing", "marks")]
)
def test_one_element_that_nobody_writes_is_named(module: Any, kernel: str, array: str) -> None:
    with pytest.raises(UnwrittenError, match=rf"thread \(26, 0, 0\) reads {array}\[5\]"):
        getattr(module, kernel)[2, 32](torch.zeros(32), 5)


@pytest.mark.parametrize("kernel", ["one_missing", "bytes_missing"])
def test_shared_memory_that_is_written_passes(module: Any, kernel: str) -> None:
    getattr(module, kernel)[1, 32](torch.zeros(32), 32)


def test_another_block_s_shared_memory_is_not_this_one_s(module: Any) -> None:
    module.of_the_block_before[1, 32](torch.zeros(32))
    with pytest.raises(UnwrittenError, match=r"block \(1, 0, 0\), thread .* reads value\[0\]"):
        module.of_the_block_before[2, 32](torch.zeros(64))


def test_an_atomic_operation_reads_unless_it_exchanges(module: Any) -> None:
    c = torch.zeros(32, dtype=torch.int32)
    with pytest.raises(UnwrittenError, match=r"counter\[0\]"):
        module.counted_from_nothing[1, 32](c)
    module.exchanged_first[1, 32](c)
    assert c.tolist() == [32] * 32


def test_what_follows_from_an_unwritten_index_is_not_told_instead(module: Any) -> None:
    with pytest.raises(UnwrittenError, match=r"reads where\[0\]"):
        module.index_from_nothing[1, 32](torch.zeros(32))


def test_dynamic_shared_memory_is_watched(module: Any) -> None:
    module.dynamic[1, 32, 128](torch.zeros(32), 32)
    with pytest.raises(UnwrittenError, match=r"thread \(20, 0, 0\) reads staged\[20\]"):
        module.dynamic[1, 32, 128](torch.zeros(32), 20)


@pytest.mark.parametrize(
    ("threads", "live", "mask", "lane", "why"),
    [
        (32, 8, 0xFF, 8, "which is not in its mask"),
        (20, 20, 0xFFFFFFFF, 20, "which has no thread: the block ends before it"),
    ],
)
def test_a_shuffle_names_the_lane_that_is_not_there(
    module: Any, threads: int, live: int, mask: int, lane: int, why: str
) -> None:
    with pytest.raises(WarpError) as error:
        module.shuffle[1, threads](torch.zeros(32), live, mask)
    assert (
        f"thread ({lane - 1}, 0, 0): __shfl_down_sync takes a value from lane {lane}, {why}"
        in str(error.value)
    )
    assert f"source.cu:{line_of('v = __shfl_down_sync(mask')}" in str(error.value)


def test_shuffles_within_their_mask_pass(module: Any) -> None:
    module.shuffle[1, 32](torch.zeros(32), 32, 0xFFFFFFFF)
    c = torch.zeros(32)
    module.tail[1, 32](c, 32)
    assert c.tolist() == [float(sum(range(32)))] * 32


def test_a_shuffle_from_a_thread_that_has_ended_is_named(module: Any) -> None:
    with pytest.raises(WarpError, match="takes a value from lane 8, whose thread has ended"):
        module.shuffle_of_ended[1, 32](torch.zeros(32))


@pytest.mark.parametrize("count", [True, False])
def test_a_caller_outside_of_its_own_mask_is_told_so(count: bool) -> None:
    checked = load(
        source=SOURCE, device="cpu", defines={"WARP": 32, "MOST": "(WARP + 8)"}, count=count
    )
    with pytest.raises(WarpError) as error:
        checked.shuffle[1, 32](torch.zeros(32), 9, 0xFF)
    assert (
        "thread (8, 0, 0) calls __shfl_down_sync with mask 0x000000ff, which leaves out its own"
        in (str(error.value))
    )
    with pytest.raises(WarpError, match=r"thread \(16, 0, 0\) calls __syncwarp .* own lane 16"):
        checked.not_in_sync[1, 32](torch.zeros(32))


@pytest.mark.parametrize("count", [True, False])
def test_a_grid_barrier_is_named(count: bool) -> None:
    """Without the check it ends at the time limit."""
    checked = load(
        source=SOURCE, device="cpu", defines={"WARP": 32, "MOST": "(WARP + 8)"}, count=count
    )
    c, flag = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(KernelTimeout) as error:
        checked.grid_barrier[3, 64](c, flag, 3)
    assert "block (0, 0, 0), thread (0, 0, 0) waits forever for c[0] to change" in str(error.value)
    assert "blocks run one after another here" in str(error.value)
    assert f"source.cu:{line_of('while (atomicAdd(c, 0) < wanted)')}" in str(error.value)


def test_a_wait_for_what_nobody_is_left_to_do_is_named(module: Any) -> None:
    c, flag = torch.zeros(32, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(KernelTimeout, match=r"waits forever for flag\[0\].* on a GPU neither"):
        module.volatile_flag[1, 32](c, flag, 1)


def test_waits_that_end_are_no_spins(module: Any) -> None:
    c, flag = torch.zeros(64, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    module.patient[1, 2](c, flag, 1)
    assert c[:2].tolist() == [30000, 30000]
    c.zero_()
    module.other_warp[1, 64](c, flag, 300_000)
    assert int(c[0]) == 2
    module.grid_barrier[1, 64](c.zero_(), flag, 1)
    assert c[:2].tolist() == [1, 1]


@pytest.mark.parametrize(("kernel", "most"), [("bounded", 64), ("bounded_by_macro", 40)])
def test_launch_bounds_are_kept(module: Any, kernel: str, most: int) -> None:
    getattr(module, kernel)[1, most](torch.zeros(most))
    with pytest.raises(ValueError) as error:
        getattr(module, kernel)[1, (most + 1, 1)](torch.zeros(most + 1))
    expression = "2 * WARP" if kernel == "bounded" else "MOST"
    line = line_of(f"__launch_bounds__({expression}")
    assert str(error.value) == (
        f"kernel {kernel}: found a block of {most + 1} threads, expected at most {most}, by "
        f"__launch_bounds__({expression}) at source.cu:{line}; a GPU refuses the launch"
    )
    module.free_size[1, 1024](torch.zeros(1024))


def test_races_are_listed_the_far_ones_first_and_each_pair_of_lines_once(listing: Any) -> None:
    c, d = torch.zeros(64), torch.zeros(2)
    report = listing.many_races[3, 64](c, d)
    write, near, far = (line_of(x) for x in ("values[t] = t;", "values[t ^ 1]", "values[t ^ 32]"))
    same, differing = line_of("d[0] = 1.0f"), line_of("d[1] = t")
    found = [(race.kind, race.lines, race.array, race.same_value) for race in report.races]
    assert [kind for kind, *_ in found] == sorted(
        (kind for kind, *_ in found),
        key=["race between blocks", "race across warps", "race within a warp"].index,
    )
    assert len({(lines, array) for _, lines, array, _ in found}) == len(found)
    assert ("race between blocks", (same, same), "d", True) in found
    assert ("race between blocks", (differing, differing), "d", False) in found
    assert ("race across warps", (write, far), "values", False) in found
    assert ("race within a warp", (write, near), "values", False) in found
    assert report.findings == report.races
    assert "(both write the same value)" in str(
        report.races[found.index(("race between blocks", (same, same), "d", True))]
    )
    assert report.table().endswith(f"{len(found)} findings, in report.findings")
    assert report.global_stores == 3 * 64 * 4


def test_undefined_values_are_listed_too(listing: Any) -> None:
    c = torch.zeros(64)
    report = listing.one_missing[2, 32](c, 5)
    assert [(f.kind, f.array) for f in report.findings] == [
        ("race between blocks", "c"),
        ("unwritten shared memory", "values"),
    ]
    assert bool(c[26].isnan())
    (lane,) = listing.shuffle[1, 32](c, 8, 0xFF).findings
    assert (lane.kind, lane.lines) == ("missing lane", (line_of("v = __shfl_down_sync(mask"),))
    assert listing.free_size[1, 64](c).findings == ()


def test_a_failure_after_a_race_brings_the_list_along(listing: Any) -> None:
    with pytest.raises(OutOfBoundsError) as error:
        listing.many_races[1, 64](torch.zeros(64), torch.zeros(1))
    assert "\nfound before: kernel many_races" in str(error.value)


def test_the_error_says_so_where_both_write_the_same(module: Any) -> None:
    source = """
    extern "C" __global__ void same(float* c) { c[0] = 1.0f; }
    extern "C" __global__ void differing(float* c) { c[0] = threadIdx.x; }
    """
    checked = load(source=source, device="cpu")
    with pytest.raises(RaceError, match="both write the same value"):
        checked.same[1, 2](torch.zeros(1))
    with pytest.raises(RaceError) as error:
        checked.differing[1, 2](torch.zeros(1))
    assert "same value" not in str(error.value)


def test_races_takes_one_of_two_words() -> None:
    with pytest.raises(ValueError, match="races must be 'raise' or 'list'; found 'all'"):
        load(source=SOURCE, races="all")
