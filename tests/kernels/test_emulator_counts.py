"""Counts of the emulator on access patterns whose cost is known."""

from __future__ import annotations

import pytest
import torch

from kernels import load
from kernels.report import LineReport, Report

STRIDED = """
extern "C" __global__ void strided(const float* a, float* c, int stride) {
    int i = threadIdx.x;
    c[i] = a[i * stride];
}
extern "C" __global__ void offset(const float* a, float* c, int start) {
    c[threadIdx.x] = a[threadIdx.x + start];
}
extern "C" __global__ void wide(const float* a, float* c, int start) {
    const float4* vectors = reinterpret_cast<const float4*>(a + start);
    float4 v = vectors[threadIdx.x];
    c[threadIdx.x] = v.x + v.y + v.z + v.w;
}
extern "C" __global__ void two_places(const float* a, float* c) {
    c[threadIdx.x] = a[threadIdx.x % 2 * 64 + threadIdx.x / 2];
}
extern "C" __global__ void doubles(const double* a, double* c) {
    c[threadIdx.x] = a[threadIdx.x];
}
extern "C" __global__ void bytes(const unsigned char* a, unsigned char* c) {
    c[threadIdx.x] = a[threadIdx.x];
}
"""

COLUMN = """
#ifndef PAD
#define PAD 0
#endif
extern "C" __global__ void column(float* c) {
    __shared__ float tile[32][32 + PAD];
    for (int row = 0; row < 32; ++row) tile[row][threadIdx.x] = row;
    __syncthreads();
    c[threadIdx.x] = tile[threadIdx.x][0];
}
"""

BANKS = """
extern "C" __global__ void banks(float* c, int stride) {
    __shared__ float values[32 * 32];
    values[threadIdx.x * stride] = threadIdx.x;
    __syncthreads();  // without it the compiler keeps the value and leaves out both accesses
    c[threadIdx.x] = values[threadIdx.x * stride];
}
extern "C" __global__ void broadcast(float* c) {
    __shared__ float value;
    if (threadIdx.x == 0) value = 3.0f;
    __syncthreads();
    c[threadIdx.x] = value;
}
extern "C" __global__ void wide(float4* c, int stride) {
    __shared__ float4 values[32 * 8];
    values[threadIdx.x * stride] = make_float4(1, 2, 3, 4);
    __syncthreads();
    c[threadIdx.x] = values[threadIdx.x * stride];
}
"""


def entry(report: Report, kind: str, array: str = "") -> LineReport:
    """The only entry of this kind."""
    (found,) = [x for x in report.by_line if x.kind == kind and (not array or x.array == array)]
    return found


@pytest.mark.parametrize(("stride", "sectors"), [(0, 1), (1, 4), (2, 8), (4, 16), (8, 32), (9, 32)])
def test_a_strided_load_costs_its_distinct_sectors(stride: int, sectors: int) -> None:
    a, c = torch.rand(32 * 9), torch.zeros(32)
    report = load(source=STRIDED).strided[1, 32](a, c, stride)
    assert torch.equal(c, a[torch.arange(32) * stride])
    assert (report.load_requests, report.load_sectors) == (1, sectors)
    assert report.sectors_per_load_request == sectors
    assert (report.store_requests, report.store_sectors) == (1, 4)
    assert (report.global_loads, report.global_stores) == (32, 32)
    assert report.bytes_loaded == report.bytes_stored == 128
    assert report.bytes_moved == 32 * (sectors + 4)


def test_a_request_that_starts_within_a_sector_costs_one_more() -> None:
    memory = torch.rand(80)
    # Sectors are those of addresses: an allocation of PyTorch starts at a multiple of 64 bytes.
    assert memory.data_ptr() % 32 == 0
    report = load(source=STRIDED).offset[1, 32](memory, torch.zeros(32), 1)
    assert report.load_sectors == 5


def test_a_sector_that_lanes_return_to_is_counted_once() -> None:
    report = load(source=STRIDED).two_places[1, 32](torch.rand(80), torch.zeros(32))
    assert report.load_sectors == 4


@pytest.mark.parametrize(("kernel", "bytes_each"), [("wide", 16), ("doubles", 8), ("bytes", 1)])
def test_sectors_follow_the_size_of_an_access(kernel: str, bytes_each: int) -> None:
    module = load(source=STRIDED)
    if kernel == "wide":
        a, c = torch.rand(128), torch.zeros(32)
        report = module.wide[1, 32](a, c, 0)
        torch.testing.assert_close(c, a.view(32, 4).sum(1))
    elif kernel == "doubles":
        report = module.doubles[1, 32](torch.rand(32).double(), torch.zeros(32).double())
    else:
        a, c = torch.arange(32, dtype=torch.uint8), torch.zeros(32, dtype=torch.uint8)
        report = module.bytes[1, 32](a, c)
        assert torch.equal(a, c)
    assert (report.global_loads, report.load_requests) == (32, 1)
    assert report.load_sectors == bytes_each
    assert report.bytes_loaded == 32 * bytes_each


@pytest.mark.parametrize(("pad", "degree"), [(0, 32), (1, 1), (2, 2), (16, 16)])
def test_a_column_of_shared_memory_conflicts_unless_padded(pad: int, degree: int) -> None:
    c = torch.zeros(32)
    report = load(source=COLUMN, defines={"PAD": pad}).column[1, 32](c)
    assert torch.equal(c, torch.arange(32.0))
    assert report.conflict_degree == degree
    assert report.bank_conflicts == degree - 1
    assert report.shared_requests == 33
    assert report.shared_wavefronts == 32 + degree
    assert entry(report, "shared load").conflict_degree == degree
    assert entry(report, "shared store").bank_conflicts == 0


@pytest.mark.parametrize(
    ("stride", "degree"), [(1, 1), (2, 2), (3, 1), (4, 4), (8, 8), (16, 16), (31, 1), (32, 32)]
)
def test_a_stride_conflicts_by_its_common_factor_with_32(stride: int, degree: int) -> None:
    report = load(source=BANKS).banks[1, 32](torch.zeros(32), stride)
    assert report.conflict_degree == degree
    assert report.bank_conflicts == 2 * (degree - 1)


def test_one_word_for_all_lanes_is_a_broadcast() -> None:
    report = load(source=BANKS).broadcast[1, 32](torch.zeros(32))
    assert (report.shared_loads, report.bank_conflicts, report.conflict_degree) == (32, 0, 1)


@pytest.mark.parametrize(("stride", "degree"), [(1, 1), (2, 2), (8, 8)])
def test_wide_accesses_are_served_for_eight_lanes_at_a_time(stride: int, degree: int) -> None:
    report = load(source=BANKS).wide[1, 32](torch.zeros(128), stride)
    load_entry = entry(report, "shared load")
    assert load_entry.wavefronts == 4 * degree
    assert load_entry.bank_conflicts == 4 * (degree - 1)


LOOPS = """
extern "C" __global__ void triangle(const float* a, float* c) {
    float sum = 0.0f;
    for (int i = 0; i <= threadIdx.x; ++i) sum += a[i];
    c[threadIdx.x] = sum;
}
extern "C" __global__ void long_loop(const float* a, float* c, int n, int each) {
    float sum = 0.0f;
    for (int i = 0; i < n; ++i) {
        if (i % 3 == threadIdx.x % 3) sum += a[0];
        sum += a[each ? i * 32 + threadIdx.x : i];
    }
    c[threadIdx.x] = sum;
}
extern "C" __global__ void zigzag(const float* a, float* c, int n) {
    float sum = 0.0f;
    for (int i = 0; i < n; ++i) {
        if (threadIdx.x & 1) sum += a[i];
        else sum -= a[i + 1];
    }
    c[threadIdx.x] = sum;
}
extern "C" __global__ void every_other(const float* a, float* c) {
    float sum = 0.0f;
    for (int i = 0; i < 64; ++i) if ((i ^ threadIdx.x) & 1) sum += a[i * 32 + threadIdx.x];
    c[threadIdx.x] = sum;
}
extern "C" __global__ void own_turn(const float* a, float* c) {
    float sum = 0.0f;
    for (int i = 0; i < 32; ++i) if (i == threadIdx.x) sum += a[i];
    c[threadIdx.x] = sum;
}
"""


def test_lanes_are_matched_by_how_often_they_came() -> None:
    """Lane t loads a[0] ... a[t]: in the n-th round all lanes that are left load a[n]."""
    a, c = torch.rand(32), torch.zeros(32)
    report = load(source=LOOPS).triangle[1, 32](a, c)
    torch.testing.assert_close(c, a.cumsum(0))
    assert report.global_loads == 32 * 33 // 2
    assert (report.load_requests, report.load_sectors) == (32, 32)
    assert entry(report, "global load", "a").inactive_lanes == 31 * 32 // 2
    # The last round is left by all that are in it, every other one by one lane.
    assert report.divergent_branches == 31


@pytest.mark.parametrize(("each", "sectors"), [(False, 1), (True, 4)])
def test_long_loops_stay_matched_across_turns(each: bool, sectors: int) -> None:
    """Lanes lose their turn at different iterations here, since some do more than others."""
    n = 5000
    a, c = torch.rand(n * 32), torch.zeros(32)
    report = load(source=LOOPS).long_loop[1, 32](a, c, n, int(each))
    (main,) = [line for line in report.by_line if line.line == 11 and line.kind == "global load"]
    assert (main.requests, main.sectors) == (n, sectors * n)
    assert main.inactive_lanes == 0


def test_a_turn_that_ends_at_a_branch_loses_none() -> None:
    n = 5000  # of three basic blocks each: some turn of 2,048 ends in the one with the branch
    report = load(source=LOOPS).zigzag[1, 32](torch.rand(n + 1), torch.zeros(32), n)
    assert entry(report, "branch").divergent_branches == n


@pytest.mark.parametrize(
    ("kernel", "here", "on_a_gpu"), [("every_other", 32, 64), ("own_turn", 1, 32)]
)
def test_known_limit_lanes_of_different_iterations_are_one_request(
    kernel: str, here: int, on_a_gpu: int
) -> None:
    """Each lane's n-th load is counted with the others' n-th: see kernels/emulator/__init__.py."""
    report = getattr(load(source=LOOPS), kernel)[1, 32](torch.rand(64 * 32), torch.zeros(32))
    assert report.load_requests == here < on_a_gpu


DIVERGENCE = """
extern "C" __global__ void guarded(float* c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = 1.0f;
}
extern "C" __global__ void reduce(const float* a, float* c) {
    __shared__ float values[256];
    values[threadIdx.x] = a[threadIdx.x];
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) values[threadIdx.x] += values[threadIdx.x + half];
    }
    if (threadIdx.x == 0) c[0] = values[0];
}
"""


@pytest.mark.parametrize(("n", "divergent"), [(128, 0), (96, 0), (100, 1), (1, 1), (0, 0)])
def test_a_guard_diverges_in_the_warp_that_it_cuts(n: int, divergent: int) -> None:
    c = torch.zeros(128)
    report = load(source=DIVERGENCE).guarded[2, 64](c, n)
    assert int(c.sum()) == n
    assert report.divergent_branches == divergent
    if divergent:
        assert entry(report, "branch").line == 4
        assert entry(report, "branch").text == "if (i < n) c[i] = 1.0f;"


def test_a_branch_after_a_barrier_is_seen() -> None:
    a, c = torch.rand(256), torch.zeros(1)
    report = load(source=DIVERGENCE).reduce[1, 256](a, c)
    torch.testing.assert_close(c[0], a.sum())
    branches = {
        line.line: line.divergent_branches for line in report.by_line if line.kind == "branch"
    }
    # 128, 64 and 32 cut between warps; 16, 8, 4, 2 and 1 within the first.
    assert branches == {11: 5, 13: 1}


def test_partial_warps_have_inactive_lanes() -> None:
    report = load(source=DIVERGENCE).guarded[1, 48](torch.zeros(48), 48)
    store = entry(report, "global store", "c")
    assert (store.requests, store.accesses, store.inactive_lanes) == (2, 48, 16)
    assert report.active_lanes == 24
    assert report.divergent_branches == 0


def test_lines_name_file_text_and_array() -> None:
    report = load(source=COLUMN).column[1, 32](torch.zeros(32))
    line = entry(report, "shared load", "tile")
    assert (line.file, line.line, line.array) == ("source.cu", 9, "tile")
    assert line.text == "c[threadIdx.x] = tile[threadIdx.x][0];"
    assert line.bytes == 128
    table = report.table().splitlines()
    assert table[0] == "column: grid 1, block 32"
    assert any("shared load" in row and "tile" in row and "32.00" in row for row in table)


def test_a_helper_used_for_two_arrays_is_counted_for_each() -> None:
    source = """
    __device__ __noinline__ float get(const float* p, int i) { return p[i]; }
    extern "C" __global__ void sum(const float* a, const float* b, float* c) {
        c[threadIdx.x] = get(a, threadIdx.x) + get(b, 2 * threadIdx.x);
    }
    """
    report = load(source=source).sum[1, 32](torch.rand(32), torch.rand(64), torch.zeros(32))
    loads = {
        line.array: (line.line, line.sectors) for line in report.by_line if "load" in line.kind
    }
    assert loads == {"a": (2, 4), "b": (2, 8)}


def test_counts_are_of_one_launch() -> None:
    kernel = load(source=STRIDED).strided
    first, second = (kernel[1, 32](torch.rand(32), torch.zeros(32), 1) for _ in range(2))
    assert first == second
