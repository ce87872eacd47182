"""The emulator computes what CUDA defines: indices, shuffles, votes, atomics, shared memory."""

from __future__ import annotations

import pytest
import torch

from kernels import load

INDICES = """
extern "C" __global__ void indices(int* out) {
    int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    dim3 size = blockDim;
    out[block * size.x * size.y * size.z + thread] =
        100000 * blockIdx.z + 10000 * blockIdx.y + 1000 * blockIdx.x +
        100 * threadIdx.z + 10 * threadIdx.y + threadIdx.x;
}
"""


@pytest.mark.parametrize("count", [True, False])
def test_every_thread_has_its_place(count: bool) -> None:
    grid, block = (4, 3, 2), (5, 3, 2)
    out = torch.zeros(24 * 30, dtype=torch.int32)
    load(source=INDICES, count=count).indices[grid, block](out)
    expected = [
        100000 * bz + 10000 * by + 1000 * bx + 100 * tz + 10 * ty + tx
        for bz in range(2)
        for by in range(3)
        for bx in range(4)
        for tz in range(2)
        for ty in range(3)
        for tx in range(5)
    ]
    assert out.tolist() == expected


SHUFFLES = """
extern "C" __global__ void shuffles(const float* a, float* out, int n, int width) {
    int t = threadIdx.x;
    float v = a[t];
    out[t] = __shfl_sync(0xffffffffu, v, n, width);
    out[32 + t] = __shfl_up_sync(0xffffffffu, v, n, width);
    out[64 + t] = __shfl_down_sync(0xffffffffu, v, n, width);
    out[96 + t] = __shfl_xor_sync(0xffffffffu, v, n, width);
}
extern "C" __global__ void wide_values(const double* a, double* out) {
    out[threadIdx.x] = __shfl_down_sync(0xffffffffu, a[threadIdx.x], 1);
}
extern "C" __global__ void votes(unsigned* out) {
    bool odd = threadIdx.x % 2;
    out[3 * threadIdx.x] = __ballot_sync(0xffffffffu, odd);
    out[3 * threadIdx.x + 1] = __any_sync(0xffffffffu, threadIdx.x == 40);
    out[3 * threadIdx.x + 2] = __all_sync(0xffffffffu, threadIdx.x < 40);
}
extern "C" __global__ void block_votes(int* out, int n) {
    int p = threadIdx.x < n;
    int count = __syncthreads_count(p), all = __syncthreads_and(p), any = __syncthreads_or(p);
    if (threadIdx.x == 0) { out[0] = count; out[1] = all; out[2] = any; }
}
extern "C" __global__ void active(unsigned* out) {
    if (threadIdx.x % 4 == 1) out[threadIdx.x] = __activemask();
}
"""


def shuffled(kind: str, lane: int, n: int, width: int) -> int:
    """Source lane by the CUDA C++ Programming Guide, "Warp Shuffle Functions", in plain Python."""
    first = lane // width * width
    if kind == "idx":
        return first + n % width
    source = {"up": lane - n, "down": lane + n, "xor": lane ^ n}[kind]
    inside = source >= first if kind == "up" else source < first + width
    return source if inside else lane


@pytest.mark.parametrize("width", [32, 16, 8])
@pytest.mark.parametrize("n", [0, 1, 5, 16, 31])
def test_shuffles_take_from_the_lane_that_the_guide_says(n: int, width: int) -> None:
    a, out = torch.rand(32), torch.zeros(128)
    load(source=SHUFFLES).shuffles[1, 32](a, out, n, width)
    for row, kind in enumerate(("idx", "up", "down", "xor")):
        expected = a[[shuffled(kind, lane, n, width) for lane in range(32)]]
        assert torch.equal(out[32 * row : 32 * row + 32], expected), kind


def test_shuffles_move_eight_bytes() -> None:
    a, out = torch.rand(32).double(), torch.zeros(32).double()
    load(source=SHUFFLES).wide_values[1, 32](a, out)
    assert torch.equal(out, torch.cat([a[1:], a[31:]]))


def test_a_shuffle_from_a_lane_that_is_not_there_gives_nothing_useful() -> None:
    """The result is undefined on a GPU: where the launch goes on, a NaN, which shows."""
    out = torch.zeros(128)
    load(source=SHUFFLES, races="list").shuffles[1, 16](torch.rand(16), out, 16, 32)
    rows = out.view(4, 32)[:, :16]
    assert bool(rows[[0, 2, 3]].isnan().all())
    assert not bool(rows[1].isnan().any()), "up: from below lane 0, so each its own"


def test_votes_are_of_one_warp() -> None:
    out = torch.zeros(64 * 3, dtype=torch.int32)
    load(source=SHUFFLES).votes[1, 64](out)
    rows = out.view(64, 3)
    assert set(rows[:, 0].tolist()) == {0xAAAAAAAA - 2**32}
    assert rows[:, 1].tolist() == [0] * 32 + [1] * 32
    assert rows[:, 2].tolist() == [1] * 32 + [0] * 32


@pytest.mark.parametrize(("n", "expected"), [(0, [0, 0, 0]), (70, [70, 0, 1]), (96, [96, 1, 1])])
def test_votes_of_a_block(n: int, expected: list[int]) -> None:
    out = torch.zeros(3, dtype=torch.int32)
    load(source=SHUFFLES).block_votes[1, 96](out, n)
    assert out.tolist() == expected


def test_the_active_mask_is_of_the_lanes_that_are_there() -> None:
    out = torch.zeros(32, dtype=torch.int32)
    load(source=SHUFFLES).active[1, 32](out)
    assert out[1] == 0x22222222
    assert int((out != 0).sum()) == 8


ATOMICS = """
extern "C" __global__ void atomics(int* i, unsigned* u, float* f, double* d, const int* a, int n) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= n) return;
    atomicAdd(&i[0], a[t]);
    atomicSub(&i[1], a[t]);
    atomicMax(&i[2], a[t]);
    atomicMin(&i[3], a[t]);
    atomicXor(&i[4], a[t]);
    atomicCAS(&i[5], t, t + 1);
    atomicExch(&i[6], 7);
    atomicInc(&u[0], 9u);
    atomicDec(&u[1], 9u);
    atomicAdd(f, 0.5f);
    atomicAdd(d, 0.25);
}
extern "C" __global__ void spin_lock(int* lock, volatile int* value) {
    bool done = false;
    while (!done) {
        if (atomicCAS(lock, 0, 1) == 0) {
            atomicExch((int*)value, *value + 1);
            atomicExch(lock, 0);
            done = true;
        }
    }
}
"""


@pytest.mark.parametrize("count", [True, False])
def test_atomics(count: bool) -> None:
    n = 100
    a = torch.randint(-50, 50, (n,), dtype=torch.int32)
    i, u = torch.zeros(7, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    f, d = torch.zeros(1), torch.zeros(1).double()
    report = load(source=ATOMICS, count=count).atomics[4, 32](i, u, f, d, a, n)
    xor = 0
    for value in a.tolist():
        xor ^= value
    total = int(a.sum())
    expected = [total, -total, max(0, int(a.max())), min(0, int(a.min())), xor, n, 7]
    assert i.tolist() == expected
    assert u.tolist() == [n % 10, (10 - n) % 10]
    assert (float(f), float(d)) == (n / 2, n / 4)
    if count:
        assert report.global_atomics == 11 * n


def test_threads_that_wait_for_each_other_take_turns() -> None:
    lock, value = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    load(source=ATOMICS, count=False).spin_lock[2, 64](lock, value)
    assert int(value) == 128


LANGUAGE = """
#include <cuda_runtime.h>
#include <float.h>
#ifndef SCALE
#define SCALE 1.0f
#endif
__constant__ float weights[3] = {0.25f, 0.5f, 0.25f};
__device__ int launches;
constexpr int N = 4;

template <int SIZE, typename T>
__device__ __forceinline__ T sum_shared(T value) {
    __shared__ T values[SIZE];
    values[threadIdx.x] = value;
    __syncthreads();
    T sum = 0;
    #pragma unroll
    for (int i = 0; i < SIZE; ++i) sum += values[i];
    __syncthreads();
    return sum;
}

extern "C" __global__ void __launch_bounds__(64) templated(
    const float* __restrict__ a, float* __restrict__ c, const int n) {
    float sum = sum_shared<64>(a[threadIdx.x]);
    double again = sum_shared<64>(static_cast<double>(a[threadIdx.x]));
    c[threadIdx.x] = SCALE * sum + static_cast<float>(again);
}
extern "C" __global__ void maths(const float* a, float* c) {
    float x = __ldg(a);
    c[0] = expm1f(x); c[1] = rsqrtf(x); c[2] = fmaf(x, x, 1.0f); c[3] = __expf(x);
    c[4] = max(x, 2.0f); c[5] = fminf(x, 2.0f); c[6] = tanhf(x); c[7] = erff(x);
    c[8] = __int_as_float(__float_as_int(x)); c[9] = __fdividef(1.0f, x); c[10] = INFINITY;
    c[11] = __popc(255u) + __clz(1) + __ffs(8) + min(3, N);
}
extern "C" __global__ void globals(float* c) {
    atomicAdd(&launches, 1);
    c[threadIdx.x] = weights[threadIdx.x % 3];
    __syncthreads();
    if (threadIdx.x == 0) c[blockDim.x] = launches;
}
extern "C" __global__ void dynamic(const float* a, float* c, int n) {
    extern __shared__ __align__(16) float staged[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) staged[i] = a[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) c[i] = staged[n - 1 - i];
}
extern "C" __global__ void uninitialised(float* c) {
    __shared__ float values[32];
    if (threadIdx.x > 100) values[threadIdx.x - 100] = 0.0f;
    __syncthreads();
    c[threadIdx.x] = values[threadIdx.x];
}
extern "C" __global__ void four_at_once(const float4* x, float4* y) {
    __shared__ float four[4], eight[2][4];
    *reinterpret_cast<float4*>(four) = x[0];
    *reinterpret_cast<float4*>(eight[1]) = *reinterpret_cast<float4*>(four);
    y[0] = *reinterpret_cast<float4*>(eight[1]);
}
extern "C" __global__ void one_byte(float* y) {
    __shared__ char one, two[3];
    one = two[0] = 1;
    y[0] = one + two[0];
}
"""


@pytest.mark.parametrize("count", [True, False])
def test_templates_with_shared_memory_of_two_types(count: bool) -> None:
    a, c = torch.rand(64), torch.zeros(64)
    module = load(source=LANGUAGE, count=count, defines={"SCALE": "3.0f"})
    report = module.templated[1, 64](a, c, 64)
    torch.testing.assert_close(c, (4 * a.sum()).expand(64))
    if count:
        assert {line.array for line in report.by_line} >= {"values", "a", "c"}


def test_mathematical_functions() -> None:
    a, c = torch.tensor([0.75]), torch.zeros(12)
    load(source=LANGUAGE).maths[1, 1](a, c)
    x = a.double()
    expected = [x.expm1(), x.rsqrt(), x * x + 1, x.exp(), x * 0 + 2, x, x.tanh(), x.erf(), x, 1 / x]
    expected += [x + torch.inf, x * 0 + 8 + 31 + 4 + 3]
    torch.testing.assert_close(c, torch.cat(expected).float())


def test_shared_floats_are_moved_as_float4_whatever_other_kernels_have() -> None:
    x, y = torch.randn(4), torch.zeros(4)
    load(source=LANGUAGE).four_at_once[1, 1](x, y)
    assert torch.equal(x, y)


def test_device_and_constant_variables() -> None:
    module = load(source=LANGUAGE)
    c = torch.zeros(9)
    module.globals[1, 8](c)
    assert c[:3].tolist() == [0.25, 0.5, 0.25]
    before = float(c[8])
    module.globals[1, 8](c)
    assert float(c[8]) == before + 8, "a __device__ variable lives as long as the module"


@pytest.mark.parametrize("n", [1, 31, 64, 1000, 12345])
def test_dynamic_shared_memory(n: int) -> None:
    a, c = torch.rand(n), torch.zeros(n)
    load(source=LANGUAGE).dynamic[1, 64, 4 * n](a, c, n)
    assert torch.equal(c, a.flip(0))


def test_shared_memory_begins_with_nothing_useful() -> None:
    c = torch.zeros(32)
    load(source=LANGUAGE, races="list").uninitialised[2, 32](c[:32])
    assert bool(c.isnan().all())


def test_a_block_of_1024_threads_with_barriers() -> None:
    source = """
    extern "C" __global__ void scan(const float* a, float* c) {
        __shared__ float values[1024];
        int t = threadIdx.x;
        values[t] = a[t];
        for (int step = 1; step < 1024; step *= 2) {
            __syncthreads();
            float other = t >= step ? values[t - step] : 0.0f;
            __syncthreads();
            values[t] += other;
        }
        c[t] = values[t];
    }
    """
    a, c = torch.rand(1024), torch.zeros(1024)
    load(source=source).scan[1, 1024](a, c)
    torch.testing.assert_close(c, a.double().cumsum(0).float())


def test_stores_of_a_function_s_result_are_seen() -> None:
    source = """
    __device__ __noinline__ float4 get(const float* p) { return *(const float4*)p; }
    extern "C" __global__ void copy(const float* a, float* c) {
        *(float4*)(c + 4 * threadIdx.x) = get(a + 4 * threadIdx.x);
    }
    """
    a, c = torch.rand(128), torch.zeros(128)
    report = load(source=source).copy[1, 32](a, c)
    assert torch.equal(a, c)
    assert (report.global_loads, report.global_stores, report.store_sectors) == (32, 32, 16)
