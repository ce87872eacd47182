"""Races between blocks: the textbook's ways to order them pass, and are found where broken.

All kernels are in one text, so that they are compiled once.
"""

from __future__ import annotations

from collections.abc import Callable
from string import Template
from typing import Any

import pytest
import torch

from kernels import RaceError, load

BLOCKS = 5
THREADS = 64

LAST_BLOCK = Template("""
// The sample threadFenceReduction: the block that comes last adds up what all have left.
extern "C" __global__ void $name(const float* x, float* part, unsigned* count, float* out) {
    __shared__ bool last;
    float sum = block_sum(x);
    if (threadIdx.x == 0) {
        part[blockIdx.x] = sum;
        $fence
        last = atomicInc(count, gridDim.x) $check;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        float all = 0.0f;
        for (int i = 0; i < gridDim.x; ++i) all += part[i];
        out[0] = all;
        count[0] = 0;
    }
}""")

EVERYBODY_S = Template("""
// Every thread leaves something, for the block that comes last.
extern "C" __global__ void $name(const float* x, float* y, unsigned* count, float* out) {
    __shared__ bool last;
    int i = blockIdx.x * 64 + threadIdx.x;
    y[i] = x[i];
    $all
    if (threadIdx.x == 0) {
        $one
        last = atomicAdd(count, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (last) out[threadIdx.x] = y[(i + 64) % (64 * gridDim.x)];
}""")

LOCKED = Template("""
extern "C" __global__ void $name(const float* x, float* part, unsigned* count, float* out) {
    float sum = block_sum(x);
    if (threadIdx.x == 0) {
        $begin
        out[0] += sum;
        $end
    }
}""")

LOOK_BACK = Template("""
// Decoupled look-back (Merrill and Garland 2016): sums of all blocks up to this one.
extern "C" __global__ void $name(const float* x, float* part, unsigned* count, float* out) {
    float sum = block_sum(x);
    $flags count;
    if (threadIdx.x == 0) {
        int b = blockIdx.x;
        part[2 * b] = sum;
        $fence
        flags[b] = 1;
        float before = 0.0f;
        for (int p = b - 1; p >= 0; --p) {
            unsigned state;
            while ((state = flags[p]) == 0) {}
            before += part[2 * p + (state == 2)];
            if (state == 2) break;
        }
        part[2 * b + 1] = before + sum;
        $fence
        flags[b] = 2;
        out[b] = before + sum;
    }
}""")

HAND_ON = Template("""
// Block 4 knows of block 0 through those between.
extern "C" __global__ void $name(const float* x, float* part, unsigned* count, float* out) {
    if (threadIdx.x != 0) return;
    int b = blockIdx.x;
    if ($waits) while (atomicAdd(&count[b - 1], 0u) == 0) {}
    if (b == 0) part[0] = x[0];
    if (b == 4) out[0] = part[0];
    __threadfence();
    atomicExch(&count[b], 1u);
}""")

TAKE, GIVE = "while (atomicCAS(count + 7, 0u, 1u) != 0) {}", "atomicExch(count + 7, 0u);"
FENCE = "__threadfence();"
TICKET = "unsigned mine = atomicAdd(count, 1u);"
VOLATILE = "volatile unsigned* flags ="

SOURCES = [
    LAST_BLOCK.substitute(name="last_block", fence=FENCE, check="== gridDim.x - 1"),
    LAST_BLOCK.substitute(name="last_block_without_fence", fence="", check="== gridDim.x - 1"),
    LAST_BLOCK.substitute(
        name="last_block_fence_of_block", fence="__threadfence_block();", check="== gridDim.x - 1"
    ),
    LAST_BLOCK.substitute(name="last_block_unasked", fence=FENCE, check=">= 0"),
    EVERYBODY_S.substitute(name="all_fence", all=FENCE + "__syncthreads();", one=""),
    EVERYBODY_S.substitute(name="one_fences", all="__syncthreads();", one=FENCE),
    EVERYBODY_S.substitute(name="one_fences_early", all="", one=FENCE),
    EVERYBODY_S.substitute(name="nobody_fences", all="__syncthreads();", one=""),
    LOCKED.substitute(name="lock", begin=TAKE, end=FENCE + GIVE),
    LOCKED.substitute(name="lock_and_fences", begin=TAKE + FENCE, end=FENCE + GIVE),
    LOCKED.substitute(name="lock_without_fence", begin=TAKE, end=GIVE),
    LOCKED.substitute(name="lock_fence_too_early", begin=TAKE + FENCE, end=GIVE),
    LOCKED.substitute(name="lock_with_plain_store", begin=TAKE, end=FENCE + "count[7] = 0;"),
    LOCKED.substitute(name="no_lock", begin="", end=""),
    LOCKED.substitute(
        name="ticket_lock",
        begin=TICKET + "while (atomicAdd(count + 1, 0u) != mine) {}",
        end=FENCE + "atomicAdd(count + 1, 1u);",
    ),
    LOCKED.substitute(
        name="volatile_lock",
        begin=f"{TICKET} {VOLATILE} count; while (flags[1] != mine) {{}}",
        end=FENCE + "flags[1] = mine + 1;",
    ),
    LOCKED.substitute(
        name="two_locks",
        begin="while (atomicCAS(count + blockIdx.x % 2, 0u, 1u) != 0) {}",
        end=FENCE + "atomicExch(count + blockIdx.x % 2, 0u);",
    ),
    LOOK_BACK.substitute(name="look_back", fence=FENCE, flags=VOLATILE),
    LOOK_BACK.substitute(name="look_back_without_fence", fence="", flags=VOLATILE),
    LOOK_BACK.substitute(name="look_back_plain_flag", fence=FENCE, flags="unsigned* flags ="),
    HAND_ON.substitute(name="hand_on", waits="b > 0"),
    HAND_ON.substitute(name="hand_on_broken", waits="b > 0 && b != 2"),
]

SOURCE = """
__device__ float total;

__device__ float block_sum(const float* x) {
    __shared__ float s[64];
    int t = threadIdx.x;
    s[t] = x[blockIdx.x * 64 + t];
    for (int half = 32; half > 0; half /= 2) {
        __syncthreads();
        if (t < half) s[t] += s[t + half];
    }
    __syncthreads();
    return s[0];
}

// All threads of all blocks take the lock, one after another.
extern "C" __global__ void everyone_locks(const float* x, float* y, unsigned* count, float* out) {
    for (bool done = false; !done;) {
        if (atomicCAS(count + 7, 0u, 1u) == 0) {
            out[0] += x[blockIdx.x * 64 + threadIdx.x];
            __threadfence();
            atomicExch(count + 7, 0u);
            done = true;
        }
    }
}

extern "C" __global__ void histogram(const float* x, float* y, unsigned* count, float* out) {
    __shared__ unsigned bins[4];
    int t = threadIdx.x;
    if (t < 4) bins[t] = 0;
    __syncthreads();
    atomicAdd(&bins[t % 4], 1u);
    __syncthreads();
    if (t < 4) atomicAdd(&count[t], bins[t]);
}
// The first block sets the bins to zero, which orders nothing for the others.
extern "C" __global__ void histogram_zeroed(const float* x, float* y, unsigned* count, float* out) {
    if (blockIdx.x == 0 && threadIdx.x < 4) count[threadIdx.x] = 0;
    __syncthreads();
    atomicAdd(&count[threadIdx.x % 4], 1u);
}
extern "C" __global__ void histogram_read(const float* x, float* y, unsigned* count, float* out) {
    if (threadIdx.x != 0) return;
    atomicAdd(&count[0], 1u);
    out[blockIdx.x] = count[0];
}
// Each block shifts its own part; its last thread reads what the next block writes.
extern "C" __global__ void shifted_in_place(const float* x, float* y, unsigned* count, float* out) {
    int i = blockIdx.x * 64 + threadIdx.x;
    float v = y[i] + (i + 1 < 64 * gridDim.x ? y[i + 1] : 0.0f);
    __syncthreads();
    y[i] = v;
}
extern "C" __global__ void disjoint(const float* x, float* y, unsigned* count, float* out) {
    int i = blockIdx.x * 64 + threadIdx.x;
    float v = x[i];
    y[i] = v;
    __syncthreads();
    y[blockIdx.x * 64 + 63 - threadIdx.x] = v + 1.0f;
}
extern "C" __global__ void same_value(const float* x, float* y, unsigned* count, float* out) {
    if (threadIdx.x == 0) out[0] = 1.0f;
}
extern "C" __global__ void other_value(const float* x, float* y, unsigned* count, float* out) {
    if (threadIdx.x == 0) out[0] = blockIdx.x;
}
extern "C" __global__ void device_variable(const float* x, float* y, unsigned* count, float* out) {
    if (threadIdx.x == 0) total += x[0];
}
extern "C" __global__ void bytes(const float* x, float* y, unsigned* count, float* out) {
    unsigned char* b = (unsigned char*)count;
    if (threadIdx.x == 0) b[blockIdx.x] = 1;  // each block a byte of its own
}
extern "C" __global__ void bytes_shared(const float* x, float* y, unsigned* count, float* out) {
    short* b = (short*)count;
    if (threadIdx.x == 0) b[blockIdx.x / 2] = blockIdx.x;
}
extern "C" __global__ void doubles(const float* x, float* y, unsigned* count, float* out) {
    double* d = (double*)y;
    if (threadIdx.x == 0) d[blockIdx.x / 2 * 2] = blockIdx.x;
}
extern "C" __global__ void vectors(const float* x, float* y, unsigned* count, float* out) {
    if (threadIdx.x == 0) ((float4*)y)[blockIdx.x] = make_float4(1, 2, 3, 4);
    if (threadIdx.x == 1 && blockIdx.x == 4) out[0] = y[7];
}
"""

RIGHT = [
    "last_block",
    "all_fence",
    "one_fences",
    "lock",
    "lock_and_fences",
    "ticket_lock",
    "volatile_lock",
    "everyone_locks",
    "look_back",
    "hand_on",
    "histogram",
    "disjoint",
    "bytes",
]
# {kernel: the word that is raced for, and texts of the two lines}
WRONG = {
    "last_block_without_fence": ("part[0]", "wrote", "reads"),
    "last_block_fence_of_block": ("part[0]", "wrote", "reads"),
    "last_block_unasked": ("part[1]", "read", "writes"),
    "one_fences_early": ("y[", "wrote", "reads"),
    "nobody_fences": ("y[", "wrote", "reads"),
    "lock_without_fence": ("out[0]", "wrote", "reads"),
    "lock_fence_too_early": ("out[0]", "wrote", "reads"),
    "lock_with_plain_store": ("count[7]", "wrote", "writes"),
    "no_lock": ("out[0]", "wrote", "reads"),
    "two_locks": ("out[0]", "wrote", "reads"),
    "look_back_without_fence": ("part[", "wrote", "reads"),
    "look_back_plain_flag": ("count[0]", "wrote", "reads"),
    "hand_on_broken": ("part[0]", "wrote", "reads"),
    "histogram_zeroed": ("count[0]", "wrote", "writes"),
    "histogram_read": ("count[0]", "read", "writes"),
    "shifted_in_place": ("y[64]", "read", "writes"),
    "same_value": ("out[0]", "wrote", "writes"),
    "other_value": ("out[0]", "wrote", "writes"),
    "device_variable": ("total[0]", "wrote", "reads"),
    "bytes_shared": ("count[0]", "wrote", "writes"),
    "doubles": ("y[0]", "wrote", "writes"),
    "vectors": ("y[7]", "wrote", "reads"),
}


@pytest.fixture(scope="module")
def module() -> Any:
    return load(source="\n".join([SOURCE, *SOURCES]), device="cpu")


def launch(module: Any, kernel: str) -> Callable[[], torch.Tensor]:
    """Runs it on numbers from 0 on; gives what is in `out` then."""
    x, out = torch.arange(BLOCKS * THREADS, dtype=torch.float32), torch.zeros(THREADS)
    part, count = torch.zeros(BLOCKS * THREADS), torch.zeros(8, dtype=torch.int32)

    def run() -> torch.Tensor:
        getattr(module, kernel)[BLOCKS, THREADS](x, part, count.view(torch.uint32), out)
        return out

    return run


@pytest.mark.parametrize("kernel", RIGHT)
def test_blocks_that_are_ordered_do_not_race(module: Any, kernel: str) -> None:
    out = launch(module, kernel)()
    total = float(sum(range(BLOCKS * THREADS)))
    if "lock" in kernel and kernel != "look_back":
        assert float(out[0]) == total
    if kernel == "look_back":
        assert float(out[BLOCKS - 1]) == total


@pytest.mark.parametrize("kernel", WRONG)
def test_blocks_that_nothing_orders_race(module: Any, kernel: str) -> None:
    place, earlier, later = WRONG[kernel]
    with pytest.raises(RaceError) as error:
        launch(module, kernel)()
    text = str(error.value)
    assert text.startswith(f"kernel {kernel}: two blocks race on {place}"), text
    assert f"block (0, 0, 0), thread ({0 if place != 'y[64]' else 63}, 0, 0) {earlier}" in text or (
        kernel not in ("no_lock", "shifted_in_place")
    )
    assert f") {earlier}" in text and f") {later}" in text
    assert "use atomicAdd() and its like; else order the blocks: a __threadfence() after" in text
