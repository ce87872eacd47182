"""Races in parts of words, views of one tensor and parts of warps; and no false ones there."""

from __future__ import annotations

import pytest
import torch

from kernels import RaceError, load

SMALL = """
extern "C" __global__ void bytes_in_place(signed char* c) { c[threadIdx.x] += 1; }
extern "C" __global__ void shorts_in_place(short* c) { c[threadIdx.x] += 1; }
extern "C" __global__ void floats_as_bytes_in_place(float* c) {
    signed char* bytes = reinterpret_cast<signed char*>(c);
    signed char v = bytes[threadIdx.x];
    __syncwarp(1u << threadIdx.x);  // with itself alone: lets all read before the first writes
    bytes[threadIdx.x] = v + 1;
}
extern "C" __global__ void from_another(signed char* c, int first, int second) {
    __shared__ signed char values[32];
    values[threadIdx.x] = threadIdx.x;
    signed char v = threadIdx.x == first ? values[second] : 0;
    __syncthreads();
    c[threadIdx.x] = v;
}
"""


@pytest.mark.parametrize(
    ("kernel", "dtype", "part"),
    [
        ("bytes_in_place", torch.int8, torch.int8),
        ("shorts_in_place", torch.int16, torch.int16),
        ("floats_as_bytes_in_place", torch.float32, torch.int8),
    ],
)
def test_threads_may_change_their_parts_of_one_word(
    kernel: str, dtype: torch.dtype, part: torch.dtype
) -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    getattr(load(source=SMALL), kernel)[1, 32](memory.view(dtype))
    parts = memory.view(part).tolist()
    assert parts == [1] * 32 + [0] * (len(parts) - 32)


@pytest.mark.parametrize(("first", "second"), [(5, 4), (6, 5), (7, 6), (8, 7), (7, 4), (4, 7)])
def test_a_byte_of_another_thread_is_a_race_within_a_word_too(first: int, second: int) -> None:
    with pytest.raises(RaceError, match=r"race on values\["):
        load(source=SMALL).from_another[1, 32](torch.zeros(32, dtype=torch.int8), first, second)


VIEWS = """
extern "C" __global__ void copy(const float* x, float* y) {
    y[threadIdx.x] = x[threadIdx.x];
}
extern "C" __global__ void three(const float* x, float* y, float* z) {
    z[threadIdx.x] = 1.0f;
    y[threadIdx.x] = x[threadIdx.x];
}
extern "C" __global__ void bytes(unsigned char* x, float* y) {
    if (threadIdx.x == 0) y[0] = 1.0f;
    if (threadIdx.x == 1) x[2] = 1;
}
"""


def test_tensors_that_overlap_are_one_memory() -> None:
    module, memory = load(source=VIEWS), torch.rand(96)
    with pytest.raises(RaceError, match=r"race on (x|y)\["):
        module.copy[1, 64](memory[1:65], memory[:64])
    module.three[1, 8](memory[:8], memory[8:16], memory[16:24])  # now they know their arrays
    with pytest.raises(RaceError, match=r"race on (y\[7|z\[0)\]"):
        # y overlaps x and z, which do not overlap each other; thread 7's y is thread 0's z
        module.three[1, 8](memory[:28], memory[24:56], memory[31:63])
    with pytest.raises(RaceError, match=r"race on x\[2\]"):
        module.bytes[1, 32](memory.view(torch.uint8), memory)


def test_tensors_side_by_side_do_not_race() -> None:
    module, memory = load(source=VIEWS), torch.rand(96)
    module.copy[1, 32](memory[1:33], memory[33:65])
    assert torch.equal(memory[1:33], memory[33:65])
    module.copy[1, 32](memory[33:65], memory[33:65])  # each thread its own
    module.three[1, 32](memory[:32], memory[32:64], memory[64:])
    assert torch.equal(memory[:32], memory[32:64])
    assert bool((memory[64:] == 1).all())


WARPS = """
extern "C" __global__ void quads_then_pairs(float* c) {
    __shared__ float values[32];
    unsigned quad = 15u << (threadIdx.x & ~3), pair = 3u << (threadIdx.x & ~1);
    values[threadIdx.x] = threadIdx.x;
    __syncwarp(quad);
    __syncwarp(pair);
    c[threadIdx.x] = values[threadIdx.x ^ 2];
}
extern "C" __global__ void pairs_that_hand_on(float* c, int other) {
    __shared__ float values[32];
    values[threadIdx.x] = threadIdx.x;
    __syncwarp(3u << (threadIdx.x & ~1));
    __syncwarp(5u << (threadIdx.x & ~2));  // t and t ^ 2: the values of t ^ 3 come along
    c[threadIdx.x] = values[threadIdx.x ^ other];
}
extern "C" __global__ void another_warp_s(float* c) {
    __shared__ float values[32];
    if (threadIdx.x < 32) {
        values[threadIdx.x] = threadIdx.x;
    } else {
        __syncwarp();
        c[threadIdx.x] = values[threadIdx.x - 32];
    }
}
extern "C" __global__ void vote(float* c) {
    __shared__ float values[32];
    values[threadIdx.x] = threadIdx.x;
    if (__ballot_sync(0xffffffffu, 1)) c[threadIdx.x] = values[threadIdx.x ^ 1];
}
"""


def test_the_last_synchronisation_does_not_undo_those_before() -> None:
    module, lanes = load(source=WARPS), torch.arange(32)
    c = torch.zeros(32)
    module.quads_then_pairs[1, 32](c)
    assert torch.equal(c, (lanes ^ 2).float())
    for other in (1, 2, 3):
        module.pairs_that_hand_on[1, 32](c, other)
        assert torch.equal(c, (lanes ^ other).float())
    with pytest.raises(RaceError):
        module.pairs_that_hand_on[1, 32](c, 4)


@pytest.mark.parametrize("kernel", ["another_warp_s", "vote"])
def test_neither_another_warp_s_nor_a_vote_s_order_counts(kernel: str) -> None:
    with pytest.raises(RaceError, match=r"race on values\["):
        getattr(load(source=WARPS), kernel)[1, 64](torch.zeros(64))


GUESSES = """
#include <cuda_fp16.h>
// As the CUDA C++ Programming Guide makes an atomicAdd of doubles.
__device__ double guide_add(double* address, double value) {
    unsigned long long* word = (unsigned long long*)address;
    unsigned long long old = *word, assumed;
    do {
        assumed = old;
        old = atomicCAS(word, assumed, __double_as_longlong(value + __longlong_as_double(assumed)));
    } while (assumed != old);
    return __longlong_as_double(old);
}
__global__ void sums(double* sum) { guide_add(sum, threadIdx.x); }
__global__ void checked_by_nobody(int* n) { if (*n < 3) atomicAdd(n, 1); }
__global__ void checked_too_late(int* n) {
    int old = *n;
    __syncthreads();
    atomicCAS(n, old, old + 1);
}
__global__ void waits(int* n) {
    atomicAdd(n, 1);
    while (*n < 64) __syncwarp(1u << threadIdx.x);
}
__global__ void pairs(__half2* sum) { atomicAdd(sum, __floats2half2_rn(1.0f, 2.0f)); }
"""


@pytest.mark.parametrize("races", ["raise", "list"])
def test_a_load_that_an_atomic_cas_checks_does_not_race(races: str) -> None:
    total = torch.zeros(1, dtype=torch.float64)
    report = load(source=GUESSES, races=races).sums[3, 64](total)
    assert not report.findings
    assert float(total) == 3 * sum(range(64))


@pytest.mark.parametrize("kernel", ["checked_by_nobody", "checked_too_late", "waits"])
def test_a_load_that_no_atomic_cas_checks_races_with_atomics(kernel: str) -> None:
    with pytest.raises(RaceError, match=r"race on n\[0\]"):
        getattr(load(source=GUESSES), kernel)[2, 64](torch.zeros(1, dtype=torch.int32))
    report = load(source=GUESSES, races="list").checked_by_nobody[2, 64](
        torch.zeros(1, dtype=torch.int32)
    )
    assert report.findings


def test_atomics_on_pairs_of_halves_do_not_race() -> None:
    total = torch.zeros(2, dtype=torch.float16)
    load(source=GUESSES).pairs[2, 32](total)
    assert total.tolist() == [64, 128]
