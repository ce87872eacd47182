"""Files as they stand on the web: host code, templates, namespaces, typedefs, CUDA's headers.

Three files, each compiled once; every kernel is compared with torch.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from kernels import load
from kernels.errors import CompileError, OutOfBoundsError
from kernels.loader import Module
from kernels.source import read_source

PAGE = r"""
#include <cstdio>
#include <iostream>
#include <vector>
#include <cuda_runtime.h>
#include <thrust/device_vector.h>
#include "helper_cuda.h"
#define CHECK(call) do { cudaError_t e = call; if (e != cudaSuccess) { \
    fprintf(stderr, "%s { \n", cudaGetErrorString(e)); exit(1); } } while (0)
#define DEVICE __device__ __forceinline__
using namespace std;
typedef float real;
using index_t = int64_t;
const int RADIUS = 1;
struct Affine { float factor; int offset; void print() const { printf("%f\n", factor); } };
std::vector<float> host_data(10);
int ceil_div(int a, int b) { return (a + b - 1) / b; }

__constant__ float w[4];
static __constant__ int order[2] = {0, 1};
__device__ int calls;

DEVICE real square(real x) { return x * x; }
template <typename T> __device__ T twice(T x) { return x + x; }
void launch_all(float* d);

/* __global__ void commented(int n) {} */
__global__ void squares(const real *__restrict__ a, real *const __restrict__ c, size_t n,
                        unsigned skip, long add, real factor = 2.0f) {
    index_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n || i < min(1, skip)) return;
    c[i] = factor * square(a[i]) + add;
    if (i == n - 1) atomicAdd(&calls, 1);
}

template <typename T, int BM, bool FLIP = false>
__global__ void __launch_bounds__(BM) reversed(const T* a, T* c) {
    extern __shared__ __align__(16) char raw[];
    T* tile = reinterpret_cast<T*>(raw);
    tile[threadIdx.x] = a[blockIdx.x * BM + threadIdx.x];
    __syncthreads();
    c[blockIdx.x * BM + threadIdx.x] = twice(tile[BM - 1 - threadIdx.x]);
}

extern "C" {
__global__ void copy16(const uint4* a, uint4* c, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) c[i] = a[i];
}
}

namespace filters { namespace {
__global__ void stencil(const float* a, float* c, int n, const float* scale = nullptr) {
    extern __shared__ float window[];
    int i = threadIdx.x;
    window[i] = a[i - RADIUS];
    if (i < 2 * RADIUS) window[i + n] = a[i + n - RADIUS];
    __syncthreads();
    float sum = 0;
    for (int k = 0; k < 3; k++) sum += w[k] * window[i + k];
    c[i] = scale ? sum * *scale : sum;
}
} }

__global__ void affine(float* c, Affine by, float4 shift, int n = 4) {
    if (threadIdx.x < n) c[threadIdx.x] = by.factor * c[threadIdx.x] + by.offset + shift.z;
}

__global__ void bits(const int* a, int* c) {
    int i = threadIdx.x, x = a[i];
    c[8 * i] = __popc(x); c[8 * i + 1] = __clz(x); c[8 * i + 2] = __brev(x);
    c[8 * i + 3] = __ffs(x); c[8 * i + 4] = max(x, 7u); c[8 * i + 5] = __mulhi(x, 1 << 16);
    c[8 * i + 6] = __byte_perm(x, 0, 0x0123);
    c[8 * i + 7] = __float2int_rn(abs(__int2float_rn(x)) / 2.0f);
}

int main(int argc, char** argv) {
    float* d;
    CHECK(cudaMalloc(&d, sizeof(float) * host_data.size()));
    squares<<<ceil_div(10, 32), 32>>>(d, d, 10, 0, 1L);
    reversed<float, 32><<<1, 32, 32 * sizeof(float)>>>(d, d);
    thrust::device_vector<float> v(10);
    std::cout << "done }" << std::endl;
    return 0;
}
"""


@pytest.fixture(scope="module")
def page() -> Module:
    return load(source=PAGE, instantiate={"T": "double", "BM": 64})


def test_every_kernel_of_a_page_loads_and_the_host_is_skipped(page: Module) -> None:
    assert page.kernels == ("squares", "reversed", "copy16", "stencil", "affine", "bits")
    assert page.refused == {}
    assert str(page.squares.signature) == (
        "squares(const float* a, float* c, unsigned long long n, unsigned int skip, long long add, "
        "float factor)"
    )
    assert "reversed(const double* a, double* c)" in repr(page)


def test_scalars_of_all_spellings_defaults_and_device_variables(page: Module) -> None:
    a, c = torch.randn(100), torch.zeros(100)
    page.variable("calls").zero_()
    report = page.squares[4, 32](a, c, 100, 3, -5)
    expected = 2 * a**2 - 5
    expected[0] = 0  # min(1, 3u)
    torch.testing.assert_close(c, expected)
    assert page.variable("calls").tolist() == [1]
    page.squares[4, 32](a, c, 100, 0, 1, 3.0)
    torch.testing.assert_close(c, 3 * a**2 + 1)
    with pytest.raises(
        TypeError, match=r"long long add, float factor\) takes 6 arguments; found 4"
    ):
        page.squares[4, 32](a, c, 100, 0)
    text = "    c[i] = factor * square(a[i]) + add;".strip()
    assert {line.text for line in report.by_line if line.kind == "global store"} == {text}


def test_a_template_is_instantiated_with_types_and_numbers(page: Module) -> None:
    a, c = torch.randn(128, dtype=torch.float64), torch.zeros(128, dtype=torch.float64)
    report = page.reversed[2, 64, 64 * 8](a, c)
    assert torch.equal(c, 2 * a.view(2, 64).flip(1).flatten())
    assert {line.array for line in report.by_line if line.kind.startswith("shared")} == {"raw"}
    with pytest.raises(OutOfBoundsError, match="the shared array raw has 504 elements"):
        page.reversed[2, 64, 63 * 8](a, c)


def test_a_pointer_to_vectors(page: Module) -> None:
    a = torch.arange(64, dtype=torch.int32)
    c = torch.zeros_like(a)
    assert page.copy16[1, 8](a, c, 16).global_loads == 16
    assert torch.equal(a, c)


def test_constant_memory_a_halo_and_a_null_pointer(page: Module) -> None:
    weights = torch.tensor([0.25, 0.5, -1.0])
    page.variable("w")[:3] = weights
    padded, c = torch.randn(34), torch.zeros(32)
    expected = torch.nn.functional.conv1d(padded.view(1, 1, -1), weights.view(1, 1, -1)).flatten()
    page.stencil[1, 32, 34 * 4](padded[1:33], c, 32)
    torch.testing.assert_close(c, expected)
    page.stencil[1, 32, 34 * 4](padded[1:33], c, 32, None)
    torch.testing.assert_close(c, expected)
    page.stencil[1, 32, 34 * 4](padded[1:33], c, 32, torch.full((1,), 2.0))
    torch.testing.assert_close(c, 2 * expected)
    with pytest.raises(OutOfBoundsError, match="reads a\\[-1\\]"):
        page.stencil[1, 32, 34 * 4](padded[1:33].clone(), c, 32)
    with pytest.raises(AttributeError, match="variable 'v'; it has w, order, calls"):
        page.variable("v")


def test_structures_by_value(page: Module) -> None:
    class Affine(ctypes.Structure):
        _fields_ = (("factor", ctypes.c_float), ("offset", ctypes.c_int))

    c = torch.arange(8.0)
    page.affine[1, 8](c, Affine(3.0, 2), (0, 0, 0.5, 0))
    assert c.tolist() == [2.5, 5.5, 8.5, 11.5, 4, 5, 6, 7]
    with pytest.raises(
        TypeError, match=r"'struct by' of affine: expected .* of 8 bytes; found int"
    ):
        page.affine[1, 8](c, 3, (0, 0, 0, 0))
    with pytest.raises(ValueError, match="expected 8 bytes; found 7"):
        page.affine[1, 8](c, bytes(7), (0, 0, 0, 0))


def test_integer_functions(page: Module) -> None:
    numbers = [0, 1, -1, 0x12345678, -(2**31), 255, 6, 1000]
    c = torch.zeros(8, 8, dtype=torch.int32)
    page.bits[1, 8](torch.tensor(numbers, dtype=torch.int32), c)
    for x, found in zip(numbers, c.tolist(), strict=True):
        word = x & 0xFFFFFFFF
        text = f"{word:032b}"
        expected = [
            text.count("1"),
            32 - word.bit_length(),
            int(text[::-1], 2),
            (word & -word).bit_length(),
            max(word, 7),
            x << 16 >> 32,
            int.from_bytes(word.to_bytes(4, "little"), "big"),
            round(float(torch.tensor(x, dtype=torch.float32).abs()) / 2),
        ]
        signed = [(n + 2**31) % 2**32 - 2**31 for n in expected]
        signed[7] = min(expected[7], 2**31 - 1)
        assert found == signed, hex(word)


NARROW = r"""
#include <cublas_v2.h>
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;

template <class T> __device__ void compute(const T* a, const T* b, T* c, int i, int n) {
    c[i] = a[i] + b[i]; c[n + i] = a[i] * b[i]; c[2 * n + i] = a[i] / b[i];
    c[3 * n + i] = -a[i] - b[i]; c[4 * n + i] = __hfma(a[i], b[i], a[i]);
    c[5 * n + i] = __hmax(a[i], b[i]);
    c[6 * n + i] = hsqrt(__habs(a[i])); c[7 * n + i] = T(a[i] < b[i] ? 1.0f : 0.0f);
}
__global__ void halves(const half* a, const __half* b, half* c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) compute(a, b, c, i, n);
}
__global__ void bfloats(const __nv_bfloat16* a, const nv_bfloat16* b, __nv_bfloat16* c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) compute(a, b, c, i, n);
}
__global__ void narrow(const float* a, half* h, __nv_bfloat16* b, float* back, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    h[i] = __float2half(a[i]); b[i] = __float2bfloat16(a[i]); back[i] = __half2float(h[i]);
}
__global__ void pairs(const half2* a, half2* c, __half scale, half* sum) {
    half2 x = a[threadIdx.x];
    float2 f = __half22float2(__hmul2(x, __half2half2(scale)));
    c[threadIdx.x] = __floats2half2_rn(f.x, f.y);
    atomicAdd(sum, __low2half(x));
}
__device__ float sum_of(cg::thread_group group, float* shared, float value) {
    int lane = group.thread_rank();
    for (int i = group.size() / 2; i > 0; i /= 2) {
        shared[lane] = value;
        group.sync();
        if (lane < i) value += shared[lane + i];
        group.sync();
    }
    return value;
}
__global__ void groups(const float* x, float* c, int* ranks) {
    __shared__ float shared[128];
    cg::thread_block block = cg::this_thread_block();
    float v = x[block.thread_rank()];
    float total = sum_of(block, shared, v);
    auto tile = cg::tiled_partition<16>(block);
    float part = cg::reduce(tile, v, cg::plus<float>());
    float most = cg::reduce(tile, v, cg::greater<float>());
    float before = cg::exclusive_scan(tile, v);
    unsigned which = tile.meta_group_rank();
    if (tile.thread_rank() == 0) { c[1 + which] = part; c[9 + which] = most; }
    if (block.thread_rank() == 0) c[0] = total;
    c[17 + block.thread_rank()] = before;
    cg::sync(block);
    if (threadIdx.x % 3 == 0) {
        cg::coalesced_group active = cg::coalesced_threads();
        int rank = active.thread_rank();
        ranks[threadIdx.x] = active.shfl(100 * active.size() + rank, 1) * 100 + rank;
    }
}
"""


@pytest.fixture(scope="module")
def narrow() -> Module:
    return load(source=NARROW)


@pytest.mark.parametrize(
    ("name", "dtype"), [("halves", torch.float16), ("bfloats", torch.bfloat16)]
)
def test_arithmetic_in_16_bits_rounds_as_torch_does(
    narrow: Module, name: str, dtype: torch.dtype
) -> None:
    n = 256
    a = torch.cat([torch.randn(200), torch.randn(56) * 1e-5]).to(dtype)
    b = torch.cat([torch.randn(200) * 50, torch.randn(56)]).to(dtype)
    c = torch.zeros(8, n, dtype=dtype)
    report = getattr(narrow, name)[2, 128](a, b, c, n)
    fused = (a.double() * b.double() + a.double()).to(dtype)
    less = (a < b).to(dtype)
    rows = [a + b, a * b, a / b, -a - b, fused, torch.maximum(a, b), a.abs().sqrt(), less]
    for row, expected in zip(c, rows, strict=True):
        torch.testing.assert_close(row, expected, rtol=0, atol=0, equal_nan=True)
    assert report.global_stores == 8 * n


def test_every_half_is_read_and_every_rounding_is_right(narrow: Module) -> None:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    exact = bits.view(torch.float16).float()
    between = torch.nextafter(exact, torch.tensor(torch.inf))  # just above a half: rounds down
    middles = (exact + torch.roll(exact, -1)) / 2
    a = torch.cat([exact, between, middles, torch.tensor([65519.0, 65520.0, 1e30, -1e30, 1e-30])])
    h, b = torch.zeros(len(a), dtype=torch.float16), torch.zeros(len(a), dtype=torch.bfloat16)
    back = torch.zeros(len(a))
    quick = load(source=NARROW, count=False)
    quick.narrow[(len(a) + 255) // 256, 256](a, h, b, back, len(a))
    for found, expected in ((h, a.half()), (b, a.bfloat16()), (back, a.half().float())):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_pairs_of_halves_and_their_atomics(narrow: Module) -> None:
    a = torch.randn(32, 2, dtype=torch.float16)
    c, total = torch.zeros_like(a), torch.zeros(1, dtype=torch.float16)
    report = narrow.pairs[1, 32](a, c, 0.5, total)
    assert torch.equal(c, a * 0.5)
    torch.testing.assert_close(total[0].float(), a[:, 0].float().sum(), rtol=0.02, atol=0.02)
    assert (report.global_atomics, report.global_loads) == (32, 32)
    lines = {x.text for x in report.by_line if x.kind == "global atomic"}
    assert lines == {"atomicAdd(sum, __low2half(x));"}


def test_cooperative_groups(narrow: Module) -> None:
    x, c = torch.randn(128), torch.zeros(17 + 128)
    ranks = torch.zeros(128, dtype=torch.int32)
    narrow.groups[1, 128](x, c, ranks)
    tiles = x.view(8, 16)
    torch.testing.assert_close(c[0], x.sum())
    torch.testing.assert_close(c[1:9], tiles.sum(1))
    assert torch.equal(c[9:17], tiles.max(1).values)
    torch.testing.assert_close(c[17:].view(8, 16), tiles.cumsum(1) - tiles, rtol=1e-4, atol=1e-5)
    for first in range(0, 128, 32):
        together = [t for t in range(first, first + 32) if t % 3 == 0]
        expected = [(100 * len(together) + 1) * 100 + rank for rank in range(len(together))]
        assert ranks[together].tolist() == expected


ABSENT = r"""
#include <mma.h>
#include <cub/cub.cuh>
#include <cooperative_groups.h>
__device__ int lane() { int id; asm("mov.u32 %0, %laneid;" : "=r"(id)); return id; }
__global__ void fine(float* c) { c[threadIdx.x] = 1.0f; }
__global__ void ptx(int* c) { c[0] = lane(); }
__global__ void tensor(const float* a) {
    nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 16, float> f;
}
__global__ void parent(float* c) {
    fine<<<1, 1>>>(c);
}
__global__ void image(cudaTextureObject_t t, float* c) { c[0] = tex2D<float>(t, 0, 0); }
__global__ void whole_grid() { cooperative_groups::this_grid().sync(); }
__global__ void unknown(float* c) { c[0] = __frobnicate(c[0]); }
__global__ void library(float* c) { using Reduce = cub::BlockReduce<float, 32>; c[0] = 0; }
__global__ void typed(Unheard* c) {}
__global__ void twice(float* c) {}
__global__ void twice(int* c) {}
"""


def test_what_the_emulator_does_not_have_is_said_in_one_line() -> None:
    module = load(source=ABSENT)
    assert module.kernels == ("fine",)
    c = torch.zeros(4)
    module.fine[1, 4](c)
    assert c.tolist() == [1.0] * 4
    expected = {
        "ptx": "inline PTX (asm): source.cu:5 (__device__ int lane()",
        "tensor": "tensor cores (wmma): source.cu:9 (nvcuda::wmma::fragment<",
        "parent": "kernels that launch kernels: source.cu:12 (fine<<<1, 1>>>(c);)",
        "image": "textures: source.cu:14 (",
        "whole_grid": "barriers of the whole grid: its blocks run one after another: source.cu:15",
        "unknown": "__frobnicate: source.cu:16 (",
        "library": "CUB (cub::): source.cu:17 (",
    }
    for name, text in expected.items():
        with pytest.raises(CompileError) as caught:
            getattr(module, name)
        assert str(caught.value).startswith("the emulator does not have " + text)
        assert "\n" not in str(caught.value)
    with pytest.raises(CompileError, match=r"g\+\+ did not accept source.cu:18 .*'Unheard'"):
        _ = module.typed
    with pytest.raises(CompileError, match="twice is overloaded"):
        _ = module.twice


TEMPLATES = """
template <typename T, int N, int M = 2> __global__ void scaled(T* c) { c[0] = N * M; }
"""


def test_a_template_says_what_it_needs() -> None:
    message = r"kernel scaled is a template of T, N, M: load\(\.\.\., instantiate=\{'N': \.\.\.\}\)"
    with pytest.raises(ValueError, match=message):
        load(source=TEMPLATES, instantiate={"T": "float"})
    with pytest.raises(ValueError, match=r"'K', which is no template parameter .* are M, N, T"):
        load(source=TEMPLATES, instantiate={"T": "float", "N": 1, "K": 2})


def test_a_file_and_what_it_includes_are_cut_into_pieces(tmp_path: Path) -> None:
    (tmp_path / "device.cuh").write_text(
        "#pragma once\n#include <vector>\n#define GPU __device__\n"
        "GPU float f(float x) { return x; }\nvoid g() { h<<<1, 1>>>(); }\n"
        "namespace a::b { __global__ void inner(float* x) { if (1) { } } }\n"
    )
    file = tmp_path / "page.cu"
    file.write_text(
        '#include "device.cuh"\n'
        'const char* text() { return "__global__ void no() {"; }\n'
        "typedef struct __align__(8) { float x, y; } Pair;\n"
        "enum class Kind { A, B };\n"
        "#if 0\n__global__ void off(int n) {}\n#else\n"
        "GPU Pair operator+(Pair a, Pair b) { return {a.x + b.x, a.y + b.y}; }\n#endif\n"
        "template <typename T>\nstruct Box { T t; };\n"
        "template <> __global__ void special<int>(int* x) {}\n"
        "template __global__ void special<float>(float*);\n"
        "constexpr int twice(int n) { return 2 * n; }\n"
        "static int table[2] = {1, 2};\n"
        "__global__ __launch_bounds__(128, 2) void outer(const float* const p, float x[], int)\n"
        "{ }\n"
    )
    source = read_source(file, None)
    assert [str(signature) for signature in source.kernels.values()] == [
        "inner(float* x)",
        "outer(const float* p, float* x, int argument_3)",
    ]
    assert source.kernels["inner"].scope == "a::b::"
    kept = [
        (p.kind, p.first_line, p.text.split("(")[0])
        for p in source.pieces
        if p.kind in ("device", "type")
    ]
    assert kept == [
        ("device", 4, "GPU float f"),
        ("type", 3, "typedef struct __align__"),
        ("type", 4, "enum class Kind { A, B };"),
        ("device", 8, "GPU Pair operator+"),
        ("type", 10, "template <typename T>\nstruct Box { T t; };"),
        ("device", 12, "template <> __global__ void special<int>"),
        ("device", 14, "constexpr int twice"),
    ]
    assert "operator" not in source.included_text() and "inner" in source.included_text()


def test_a_macro_in_launch_bounds_is_not_the_kernels_name() -> None:
    source = read_source(
        None,
        "#define LEAST(a, b) ((a) < (b) ? (a) : (b))\n"
        "template <int N> __launch_bounds__(N, LEAST(2 * sizeof(float), 8))\n"
        "__global__ void first(float* x) { }\n"
        "__global__ void __launch_bounds__(LEAST(256, 512)) second(float* x) { }\n",
    )
    assert [str(kernel) for kernel in source.kernels.values()] == [
        "first(float* x)",
        "second(float* x)",
    ]


def test_variables_are_those_that_are_declared() -> None:
    source = read_source(
        None,
        'const char* text = R"-(__global__ void no(int* x) { )" )-";\n'
        "struct Counter { __device__ static int calls; __device__ int next() { return 1; } };\n"
        "__device__ int Counter::calls = 4;\n"
        "__constant__ struct Pair { int a, b; } pair;\n"
        "template <typename T> __device__ T one_of_many;\n"
        "__device__ unsigned first = 1, second[2] = {1, 2};\n"
        "namespace inner { __device__ float4 four; }\n"
        "__global__ void kernel(int* x) { x[0] = first; }\n",
    )
    assert source.symbols == ("Counter::calls", "pair", "first", "second", "inner::four")
    assert list(source.kernels) == ["kernel"]
