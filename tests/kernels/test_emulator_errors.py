"""What a kernel does wrong is reported with its line, and leaves the process alive."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest
import torch

from kernels import load
from kernels.errors import (
    AssertionFailed,
    BarrierError,
    KernelCrash,
    KernelError,
    KernelTimeout,
    MisalignedError,
    OutOfBoundsError,
    RaceError,
)


def message(error: type[BaseException], launch: Callable[[], object]) -> str:
    """Text of the error that the launch raises."""
    with pytest.raises(error) as caught:
        launch()
    assert type(caught.value) is error
    return str(caught.value)


RACES = """
extern "C" __global__ void missing_barrier(float* c) {
    __shared__ float values[64];
    values[threadIdx.x] = threadIdx.x;
    c[threadIdx.x] = values[63 - threadIdx.x];
}
extern "C" __global__ void missing_second_barrier(float* c) {
    __shared__ float values[64];
    for (int i = 0; i < 2; ++i) {
        values[threadIdx.x] = i;
        __syncthreads();
        c[threadIdx.x] = values[63 - threadIdx.x];
    }
}
extern "C" __global__ void same_element(float* c) {
    c[threadIdx.x / 2] = threadIdx.x;
}
extern "C" __global__ void within_a_warp(float* c, int synchronise) {
    __shared__ float values[32];
    values[threadIdx.x] = threadIdx.x;
    if (synchronise) __syncwarp();
    c[threadIdx.x] = values[31 - threadIdx.x];
}
extern "C" __global__ void after_a_shuffle(float* c) {
    __shared__ float values[64];
    float v = threadIdx.x;
    values[threadIdx.x] = v;
    v = __shfl_xor_sync(0xffffffffu, v, 1);
    c[threadIdx.x] = v + values[threadIdx.x ^ 2];
}
extern "C" __global__ void across_warps(float* c) {
    __shared__ float values[64];
    values[threadIdx.x] = threadIdx.x;
    __syncwarp();
    c[threadIdx.x] = values[threadIdx.x ^ 32];
}
extern "C" __global__ void half_a_warp(float* c, int other) {
    __shared__ float values[32];
    unsigned mask = threadIdx.x < 16 ? 0xffffu : 0xffff0000u;
    values[threadIdx.x] = threadIdx.x;
    __syncwarp(mask);
    c[threadIdx.x] = values[threadIdx.x ^ other];
}
extern "C" __global__ void atomics(int* c, int plain) {
    atomicAdd(c, 1);
    if (plain && threadIdx.x == 7) c[0] = 0;
}
extern "C" __global__ void bytes(unsigned char* c, int shift) {
    c[threadIdx.x >> shift] = 1;
}
extern "C" __global__ void write_after_reads(float* c) {
    __shared__ float value[1];
    if (threadIdx.x == 0) value[0] = 1.0f;
    __syncthreads();
    c[threadIdx.x] = value[0];
    if (threadIdx.x == 40) value[0] = 2.0f;
}
extern "C" __global__ void first_reader_writes(float* c) {
    float v = c[0];
    __syncwarp(1u << threadIdx.x);  // with itself alone: only lets the other lanes read first
    if (threadIdx.x == 0) c[0] = v + 1.0f;
}
"""


def test_a_missing_barrier_is_a_race_of_two_lines() -> None:
    kernel = load(source=RACES).missing_barrier
    text = message(RaceError, lambda: kernel[1, 64](torch.zeros(64)))
    assert "kernel missing_barrier, block (0, 0, 0): two threads race on values[" in text
    # The first warp ran to its end before the second began: so the read is the earlier one.
    assert "thread (31, 0, 0) read it at source.cu:5 (c[threadIdx.x] = values[63 - " in text
    assert "thread (32, 0, 0) writes it at source.cu:4 (values[threadIdx.x] = threadIdx.x;)" in text


def test_a_barrier_is_needed_at_the_loop_s_end_too() -> None:
    kernel = load(source=RACES).missing_second_barrier
    text = message(RaceError, lambda: kernel[1, 64](torch.zeros(64)))
    assert "race on values[" in text
    assert "source.cu:10" in text
    assert "source.cu:12" in text


def test_threads_that_write_one_element_race() -> None:
    kernel = load(source=RACES).same_element
    text = message(RaceError, lambda: kernel[(2, 3), 64](torch.zeros(32)))
    assert "block (0, 0, 0): two threads race on c[0]" in text
    assert "thread (0, 0, 0) wrote it" in text
    assert "thread (1, 0, 0) writes it" in text


def test_lanes_of_a_warp_race_unless_they_synchronise() -> None:
    kernel = load(source=RACES).within_a_warp
    c = torch.zeros(32)
    kernel[1, 32](c, 1)
    assert torch.equal(c, 31 - torch.arange(32.0))
    assert "source.cu:22" in message(RaceError, lambda: kernel[1, 32](c, 0))


@pytest.mark.parametrize("kernel", ["after_a_shuffle", "across_warps"])
def test_a_shuffle_orders_nothing_and_a_warp_only_itself(kernel: str) -> None:
    """Shuffles "do not imply a memory barrier" (CUDA C++ Programming Guide)."""
    launch = getattr(load(source=RACES), kernel)[1, 64]
    assert "race on values[" in message(RaceError, lambda: launch(torch.zeros(64)))


@pytest.mark.parametrize(("other", "races"), [(1, False), (8, False), (16, True)])
def test_a_part_of_a_warp_orders_its_own_lanes(other: int, races: bool) -> None:
    kernel = load(source=RACES).half_a_warp
    c = torch.zeros(32)
    if races:
        message(RaceError, lambda: kernel[1, 32](c, other))
    else:
        kernel[1, 32](c, other)
        assert torch.equal(c, (torch.arange(32) ^ other).float())


def test_atomics_race_with_plain_accesses_only() -> None:
    kernel = load(source=RACES).atomics
    c = torch.zeros(1, dtype=torch.int32)
    kernel[3, 96](c, 0)
    assert int(c) == 3 * 96
    assert "c[0]" in message(RaceError, lambda: kernel[1, 32](c, 1))


def test_bytes_of_one_word_are_apart() -> None:
    kernel = load(source=RACES).bytes
    kernel[1, 64](torch.zeros(64, dtype=torch.uint8), 0)
    message(RaceError, lambda: kernel[1, 64](torch.zeros(64, dtype=torch.uint8), 1))


def test_a_write_after_another_thread_s_read_is_a_race() -> None:
    kernel = load(source=RACES).write_after_reads
    text = message(RaceError, lambda: kernel[1, 64](torch.zeros(64)))
    assert "thread (40, 0, 0) writes it" in text
    assert "read it at source.cu:55" in text


def test_the_first_reader_races_with_the_others() -> None:
    kernel = load(source=RACES).first_reader_writes
    kernel[1, 1](torch.zeros(1))
    text = message(RaceError, lambda: kernel[1, 32](torch.zeros(1)))
    assert "thread (0, 0, 0) writes it at source.cu:61" in text
    assert "read it at source.cu:59" in text


BOUNDS = """
extern "C" __global__ void unguarded(const float* a, float* c, int shift) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    c[i] = a[i + shift];
}
extern "C" __global__ void wild(float* c) {
    long long address = 0x123456789a0;
    c[0] = *reinterpret_cast<float*>(address);
}
extern "C" __global__ void null(float* c) {
    float* p = c;
    if (threadIdx.x == 0) p = nullptr;
    *p = 1.0f;
}
extern "C" __global__ void tile(float* c, int column) {
    __shared__ float values[8][8];
    values[threadIdx.x][column] = 1.0f;
    __syncthreads();
    c[threadIdx.x] = values[threadIdx.x][column];
}
extern "C" __global__ void registers(float* c, int n) {
    float local[4] = {0, 0, 0, 0};
    for (int i = 0; i < n; ++i) local[i] += c[i];
    c[0] = local[0] + local[3];
}
extern "C" __global__ void dynamic(float* c) {
    extern __shared__ float values[];
    values[threadIdx.x] = 1.0f;
    __syncthreads();
    c[threadIdx.x] = values[threadIdx.x];
}
extern "C" __global__ void vectors(const float* a, float* c, int start) {
    float4 v = *reinterpret_cast<const float4*>(a + start);
    c[0] = v.x + v.y + v.z + v.w;
}
extern "C" __global__ void atomic(int* c, int i) { atomicAdd(c + i, 1); }
"""


@pytest.mark.parametrize(("shift", "what"), [(1, "reads a[100]"), (-1, "reads a[-1]")])
def test_an_index_outside_of_a_tensor_names_it(shift: int, what: str) -> None:
    kernel = load(source=BOUNDS).unguarded
    text = message(
        OutOfBoundsError, lambda: kernel[10, 10](torch.zeros(100), torch.zeros(100), shift)
    )
    assert what in text
    assert "the tensor a has 100 elements" in text
    assert "source.cu:4 (c[i] = a[i + shift];)" in text
    where = (
        "block (9, 0, 0), thread (9, 0, 0)" if shift == 1 else "block (0, 0, 0), thread (0, 0, 0)"
    )
    assert where in text


def test_a_grid_larger_than_the_tensors_is_found() -> None:
    kernel = load(source=BOUNDS).unguarded
    a, c = torch.zeros(100), torch.zeros(100)
    assert "block (3, 0, 0), thread (4, 0, 0) reads a[100]" in message(
        OutOfBoundsError, lambda: kernel[4, 32](a, c, 0)
    )


@pytest.mark.parametrize("kernel", ["wild", "null"])
def test_a_wild_pointer_is_found_before_it_is_used(kernel: str) -> None:
    launch = getattr(load(source=BOUNDS), kernel)[1, 1]
    c = torch.zeros(4)
    text = message(OutOfBoundsError, lambda: launch(c))
    assert "which is in no tensor and no shared array" in text
    assert f"source.cu:{8 if kernel == 'wild' else 13}" in text


def test_an_index_outside_of_a_dimension_is_found() -> None:
    kernel = load(source=BOUNDS).tile
    kernel[1, 8](torch.zeros(8), 7)
    text = message(OutOfBoundsError, lambda: kernel[1, 8](torch.zeros(8), 8))
    assert "index 8 is outside of an array's dimension: source.cu:17" in text


def test_a_thread_s_own_array_is_checked() -> None:
    kernel = load(source=BOUNDS).registers
    kernel[1, 1](torch.zeros(4), 4)
    assert "index 4" in message(OutOfBoundsError, lambda: kernel[1, 1](torch.zeros(64), 64))


def test_dynamic_shared_memory_is_as_large_as_the_launch_says() -> None:
    kernel = load(source=BOUNDS).dynamic
    c = torch.zeros(16)
    kernel[1, 16, 64](c)
    assert torch.equal(c, torch.ones(16))
    text = message(OutOfBoundsError, lambda: kernel[1, 16, 60](c))
    assert "writes values[15], but the shared array values has 15 elements" in text


def test_a_vector_load_must_be_aligned() -> None:
    kernel = load(source=BOUNDS).vectors
    a = torch.arange(12.0)
    c = torch.zeros(1)
    kernel[1, 1](a, c, 4)
    assert float(c) == 4 + 5 + 6 + 7
    text = message(MisalignedError, lambda: kernel[1, 1](a, c, 3))
    assert "reads 16 bytes at a[3]" in text
    message(OutOfBoundsError, lambda: kernel[1, 1](a[:10].clone(), c, 8))


def test_atomics_are_checked() -> None:
    kernel = load(source=BOUNDS).atomic
    c = torch.zeros(2, dtype=torch.int32)
    assert "c[2]" in message(OutOfBoundsError, lambda: kernel[1, 1](c, 2))


BARRIERS = """
extern "C" __global__ void half(float* c) {
    if (threadIdx.x < 16) __syncthreads();
    c[threadIdx.x] = 1.0f;
}
extern "C" __global__ void returned(float* c, int n) {
    if (threadIdx.x >= n) return;
    __syncthreads();
    c[threadIdx.x] = 1.0f;
}
extern "C" __global__ void different(float* c) {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    c[threadIdx.x] = 1.0f;
}
extern "C" __global__ void shuffle(float* c) {
    float v = threadIdx.x;
    if (threadIdx.x < 16) v = __shfl_down_sync(0xffffffffu, v, 1);
    __syncthreads();
    c[threadIdx.x] = v;
}
"""


@pytest.mark.parametrize("kernel", ["half", "returned"])
def test_a_barrier_that_some_do_not_reach(kernel: str) -> None:
    module = load(source=BARRIERS)
    c = torch.zeros(64)
    arguments = (c,) if kernel == "half" else (c, 16)
    text = message(BarrierError, lambda: getattr(module, kernel)[1, 64](*arguments))
    assert "__syncthreads is not reached by all threads of the block" in text
    assert f"thread (0, 0, 0) waits at source.cu:{3 if kernel == 'half' else 8}" in text
    assert "thread (16, 0, 0) has ended" in text
    assert "the emulator is stricter" in text


def test_two_barriers_are_not_one() -> None:
    text = message(BarrierError, lambda: load(source=BARRIERS).different[1, 64](torch.zeros(64)))
    assert "waits at source.cu:13" in text
    assert "thread (32, 0, 0) waits at source.cu:15" in text
    assert "stricter" not in text


def test_a_shuffle_needs_the_lanes_of_its_mask() -> None:
    text = message(BarrierError, lambda: load(source=BARRIERS).shuffle[1, 32](torch.zeros(32)))
    assert "__shfl_down_sync is not reached by all threads of the warp's mask" in text
    assert "waits at source.cu:21" in text
    assert "thread (16, 0, 0) waits at source.cu:22" in text


@pytest.mark.parametrize("kernel", ["half", "returned"])
def test_barriers_are_checked_without_counting(kernel: str) -> None:
    module = load(source=BARRIERS, count=False)
    c = torch.zeros(64)
    arguments = (c,) if kernel == "half" else (c, 16)
    message(BarrierError, lambda: getattr(module, kernel)[1, 64](*arguments))


CRASHES = """
#include <assert.h>
extern "C" __global__ void divide(int* c, int by) { c[0] = 7 / by; }
extern "C" __global__ void asserted(int* c, int n) {
    assert(threadIdx.x < n);
    c[threadIdx.x] = 1;
}
extern "C" __global__ void endless(int* c) {
    volatile int going = 1;
    while (going) {
        if (c[0] == 123) going = 0;
    }
}
extern "C" __global__ void silent(int* c) {
    unsigned x = threadIdx.x;
    while (x != 0xffffffffu) x = x / 2 * 2;
    c[0] = x;
}
extern "C" __global__ void barriers(int* c) {
    while (true) __syncthreads();
}
__device__ __noinline__ int deep(int* c, int n) {
    volatile int local[64];
    local[n % 64] = n;
    return n == 0 ? 0 : deep(c, n - 1) + local[n % 64] + c[0];
}
extern "C" __global__ void recursive(int* c, int n) { c[0] = deep(c, n); }
extern "C" __global__ void wild(int* c) { *reinterpret_cast<int*>(c[0] + 16ll) = 1; }
extern "C" int raise(int);
extern "C" __global__ void interrupted(int* c) {
    if (blockIdx.x == 0) raise(2);  // as if Ctrl-C came now
    c[blockIdx.x] = 1;
}
"""


@pytest.mark.parametrize("count", [True, False])
def test_a_division_by_zero_does_not_end_the_process(count: bool) -> None:
    kernel = load(source=CRASHES, count=count).divide
    c = torch.zeros(1, dtype=torch.int32)
    text = message(KernelCrash, lambda: kernel[1, 1](c, 0))
    assert "SIGFPE: an integer division by zero" in text
    assert "source.cu:3" in text
    kernel[1, 1](c, 2)
    assert int(c) == 3


@pytest.mark.parametrize("count", [True, False])
def test_an_assertion_names_its_condition(count: bool) -> None:
    kernel = load(source=CRASHES, count=count).asserted
    c = torch.zeros(8, dtype=torch.int32)
    kernel[1, 8](c, 8)
    text = message(AssertionFailed, lambda: kernel[1, 8](c, 5))
    assert "thread (5, 0, 0): assert(threadIdx.x < n) failed: source.cu:5" in text


@pytest.mark.parametrize("count", [True, False])
def test_a_stack_overflow_is_survived(count: bool) -> None:
    kernel = load(source=CRASHES, count=count).recursive
    c = torch.ones(1, dtype=torch.int32)
    assert "SIGSEGV" in message(KernelCrash, lambda: kernel[1, 1](c, 1_000_000))
    kernel[1, 1](c, 5)


def test_a_wild_pointer_without_checks_is_survived() -> None:
    kernel = load(source=CRASHES, count=False).wild
    c = torch.zeros(1, dtype=torch.int32)
    assert "SIGSEGV: a wild pointer" in message(KernelCrash, lambda: kernel[1, 1](c))


# Without counting the compiler may leave out a loop that does nothing, as C++ permits.
@pytest.mark.parametrize(
    ("kernel", "line", "count"),
    [
        ("endless", 10, True),
        ("endless", 10, False),
        ("silent", 16, True),
        ("barriers", 20, True),
        ("barriers", 20, False),
    ],
)
def test_an_endless_loop_is_stopped(kernel: str, line: int, count: bool) -> None:
    module = load(source=CRASHES, timeout_s=0.3, count=count)
    c = torch.zeros(1, dtype=torch.int32)
    text = message(KernelTimeout, lambda: getattr(module, kernel)[1, 40](c))
    assert f"kernel {kernel} did not end within 0.3 s" in text
    if kernel != "barriers":
        assert any(f"source.cu:{n} " in text for n in (line, line + 1)), text


@pytest.mark.parametrize(
    ("kernel", "count"), [("endless", True), ("endless", False), ("silent", True)]
)
def test_a_launch_can_be_interrupted(kernel: str, count: bool) -> None:
    module = load(source=CRASHES, count=count)
    before = signal.getsignal(signal.SIGINT)
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        getattr(module, kernel)[1, 32](torch.zeros(1, dtype=torch.int32))
    timer.join()
    assert signal.getsignal(signal.SIGINT) is before
    module.divide[1, 1](torch.zeros(1, dtype=torch.int32), 2)


@pytest.mark.parametrize("count", [True, False])
@pytest.mark.parametrize("blocks", [1, 3])
def test_a_launch_shorter_than_a_tick_can_be_interrupted(blocks: int, count: bool) -> None:
    c = torch.zeros(blocks, dtype=torch.int32)
    kernel = load(source=CRASHES, count=count).interrupted
    with pytest.raises(KeyboardInterrupt, match="kernel interrupted was interrupted"):
        kernel[blocks, 1](c)
    assert c.tolist() == [1, 0, 0][:blocks]


def test_a_failed_launch_leaves_no_trace() -> None:
    module = load(source=RACES)
    c = torch.zeros(32)
    clean = module.within_a_warp[1, 32](c, 1)
    message(RaceError, lambda: module.within_a_warp[1, 32](c, 0))
    assert module.within_a_warp[1, 32](c, 1) == clean
    assert issubclass(RaceError, KernelError)
