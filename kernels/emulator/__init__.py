"""Runs CUDA C++ on the CPU: grids, blocks, warps, shared memory, barriers, shuffles and atomics.

    library = EmulatedLibrary(
        source, {"scale": "scale<float>"}, {"TILE": "16"}, count=True, timeout_s=60.0
    )
    report = library.launch(signature, configuration, arguments)

How: g++ compiles the file without its host code, with headers that stand for CUDA's (`include/`),
and inserts a call before every access to memory and at the start of every basic block. Those calls,
the threads (fibers, which take turns within one thread of the process) and the barriers are in
`runtime/`. So each access is checked before it happens, and counted for its warp and its line of
the source.

What ends a launch, with the line and the thread (`kernels.errors`): an access out of bounds or
misaligned; a barrier or warp operation that not all reach; a race, within a block or between
blocks; a load of shared memory that nobody wrote; a shuffle from a lane that is not there; a mask
without its caller; a wait that can never end. `load(..., races="list")` lists races and undefined
values instead (`report.findings`) and goes on.

Orders that it knows, for races: barriers of the block and of the warp (no shuffles, no votes);
between blocks, and within one, `__threadfence()` and then an atomic operation or a volatile store,
which the other thread reads by an atomic operation or a volatile load. So locks, tickets, flags and
"the last block adds up" pass if their fences are there. `__threadfence_block()` orders nothing for
other blocks. Launches are ordered.

What is exact: what the kernel computes up to rounding; accesses; and, where the lanes of a warp
come to an access together, its requests, sectors and bank conflicts, for each access that the
compiler keeps. What is not, or is not there:

- Lanes are matched by how often each came to an instruction since the warp last synchronised: lanes
  that come in different iterations are counted as one request, where a GPU makes several.
- Shared accesses of 8 and 16 bytes are served for 16 and 8 lanes at a time. For devices of compute
  capability 7.x NVIDIA says that fewer passes do where neighbouring lanes want one address; that is
  left out, and no count was compared with Nsight Compute.
- Which accesses there are depends on the compiler (a value read twice may be loaded once, as with
  nvcc), and so does how code is cut into steps. nvcc merges neighbouring accesses into wide ones,
  which is not done here: `kernels.sass` shows how many.
- Blocks run one after another, in order: a barrier of the whole grid by spinning cannot be passed
  (it is named), and races are those of this order: who reads a flag without looking at it counts as
  one who waited. Of many races on one word some are found, not all.
- With g++ before version 11, volatile accesses count as plain ones, and a shared array that nobody
  writes reads as 0; so do volatile accesses with clang++.
- A tensor that is a view may be read and written anywhere in its storage, as a GPU allows it (a
  halo): an index that leaves the view and not the storage is no error.
- An index that leaves one shared array and hits another (unless the array's size is in its type),
  or one tensor and another of the launch (`a = big[:32]`, `b = big[32:]`, `a[32]`), is no error.
- Time, caches, the order in which a GPU would run threads, and a structure in memory that is passed
  by value to a function which is not inlined.

Works on Linux, x86-64, with g++ (or clang++, which counts a float4 as four accesses).
"""

from kernels.emulator.library import EmulatedLibrary

__all__ = ["EmulatedLibrary"]
