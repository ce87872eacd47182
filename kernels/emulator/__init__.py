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

What is exact: what the kernel computes up to rounding; accesses; and, where the lanes of a warp
come to an access together, its requests, sectors and bank conflicts, for each access that the
compiler keeps. What is not, or is not there:

- Lanes are matched by how often each came to an instruction since the warp last synchronised: lanes
  that come in different iterations are counted as one request, where a GPU makes several.
- Shared accesses of 8 and 16 bytes are served for 16 and 8 lanes at a time. For devices of compute
  capability 7.x NVIDIA says that fewer passes do where neighbouring lanes want one address; that is
  left out, and no count was compared with Nsight Compute.
- Which accesses there are depends on the compiler (a value read twice may be loaded once, as with
  nvcc), and so does how code is cut into steps.
- A tensor that is a view may be read and written anywhere in its storage, as a GPU allows it (a
  halo): an index that leaves the view and not the storage is no error.
- An index that leaves one shared array and hits another (unless the array's size is in its type),
  or one tensor and another of the launch (`a = big[:32]`, `b = big[32:]`, `a[32]`), is no error.
- Time, caches, the order in which a GPU would run threads, a race that two blocks have, and a
  structure in memory that is passed by value to a function which is not inlined.

Works on Linux, x86-64, with g++ (or clang++, which counts a float4 as four accesses).
"""

from kernels.emulator.library import EmulatedLibrary

__all__ = ["EmulatedLibrary"]
