"""How fast the CUDA emulator is, beside numba's CUDA simulator on the same kernel.

A tiled matrix product (`kernels/cuda/06_matmul_tiled.cu`, TILE 16) is launched twice: with all
counting and checking, and with both off. Numba's simulator runs the same algorithm written in
Python. It counts and checks nothing, so the ratio of like with like is the one without counting;
the other says what counting costs. Numba is too slow for 256 x 256 x 256, so times are compared
per multiplication and addition. It is no dependency of the course: give the Python of an
environment that has it; without one only the emulator is timed.

    python benchmarks/emulator.py [--numba-python PATH/TO/python] [--size 48]

Times are the best of several and depend on the machine and on what else it does, so that they are
printed beside what was aimed at, and decide nothing: it exits 1 for a wrong product only.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time

import torch

from kernels import load
from kernels.loader import Kernel

TILE = 16
LARGE = 256
AIM_S = 2.0
AIM_RATIO = 1000

# One static shared array a line: the simulator takes two on one line for the same array.
NUMBA_SCRIPT = """
import sys, time
import numpy as np
from numba import cuda, float32
TILE, n = 16, int(sys.argv[1])

@cuda.jit
def matmul_tiled(a, b, c, M, N, K):
    a_tile = cuda.shared.array((TILE, TILE), float32)
    b_tile = cuda.shared.array((TILE, TILE), float32)
    tx = cuda.threadIdx.x
    ty = cuda.threadIdx.y
    row = cuda.blockIdx.y * TILE + ty
    col = cuda.blockIdx.x * TILE + tx
    total = np.float32(0)
    for k0 in range(0, K, TILE):
        a_tile[ty, tx] = a[row, k0 + tx] if row < M and k0 + tx < K else 0.0
        b_tile[ty, tx] = b[k0 + ty, col] if k0 + ty < K and col < N else 0.0
        cuda.syncthreads()
        for k in range(TILE):
            total += a_tile[ty, k] * b_tile[k, tx]
        cuda.syncthreads()
    if row < M and col < N:
        c[row, col] = total

rng = np.random.default_rng(0)
a, b = (rng.standard_normal((n, n), dtype=np.float32) for _ in range(2))
best = float("inf")
for _ in range(2):
    c = np.zeros((n, n), np.float32)
    start = time.perf_counter()
    matmul_tiled[(-(-n // TILE), -(-n // TILE)), (TILE, TILE)](a, b, c, n, n, n)
    best = min(best, time.perf_counter() - start)
assert np.abs(c - a @ b).max() < 1e-3
print(best)
"""


def emulated_s(kernel: Kernel, n: int, repeats: int) -> float:
    """Best wall time of an n x n x n product, the report included."""
    a, b, c = torch.randn(n, n), torch.randn(n, n), torch.zeros(n, n)
    blocks = -(-n // TILE)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        kernel[(blocks, blocks), (TILE, TILE)](a, b, c, n, n, n)
        times.append(time.perf_counter() - start)
    torch.testing.assert_close(c, a @ b, rtol=1e-4, atol=1e-3)
    return min(times)


def numba_s(python: str, n: int) -> float:
    """The same in numba's simulator, in a process of its own."""
    done = subprocess.run(
        [python, "-c", NUMBA_SCRIPT, str(n)],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"numba's simulator failed under {python}:\n{done.stderr[-2000:]}")
    return float(done.stdout)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    own = sys.executable if importlib.util.find_spec("numba") else None
    parser.add_argument("--numba-python", default=own, help="a Python that has numba")
    parser.add_argument("--size", type=int, default=48, help="rows of the matrices for numba")
    options = parser.parse_args()

    counted = load("06_matmul_tiled", device="cpu", defines={"TILE": TILE}).matmul_tiled
    plain = load("06_matmul_tiled", device="cpu", defines={"TILE": TILE}, count=False).matmul_tiled
    counted_s, plain_s = (emulated_s(kernel, LARGE, repeats=5) for kernel in (counted, plain))
    print(f"{LARGE}^3 counted       {counted_s:8.3f} s   aim: at most {AIM_S:g} s")
    print(f"{LARGE}^3 not counted   {plain_s:8.3f} s")
    if options.numba_python is None:
        print("numba's simulator: not timed (no numba; --numba-python names a Python that has it)")
        return
    n = options.size
    simulated_s = numba_s(options.numba_python, n)
    with_counts, without = (simulated_s / n**3 / (s / LARGE**3) for s in (counted_s, plain_s))
    print(f"{n:3}^3 numba         {simulated_s:8.3f} s   (its simulator counts nothing)")
    print("Per multiplication and addition, numba's simulator takes")
    print(f"  {without:7,.0f} times as long as the emulator without counting (like with like;")
    print(f"          aim: at least {AIM_RATIO:,})")
    print(f"  {with_counts:7,.0f} times as long as the emulator with all counting and checking")


if __name__ == "__main__":
    main()
