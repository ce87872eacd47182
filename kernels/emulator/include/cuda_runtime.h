// What a .cu file needs from CUDA, for a C++ compiler on a CPU.
//
// Included before the kernel's own text (g++ -include), so that the same file is compiled by nvcc and
// by g++. The functions that touch other threads (barriers, shuffles, atomics) are implemented in
// runtime/; the rest is here. Beside it: cooperative_groups.h, cuda_fp16.h, cuda_bf16.h. Left out:
// textures, inline PTX, tensor cores, clusters, libraries (CUB, Thrust, cuRAND), and the host's
// functions, of which only the types are here.
#pragma once

#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <type_traits>

// For functions whose accesses and branches are not the kernel's own.
#if defined(__clang__)
#define EMULATOR_UNCOUNTED __attribute__((noinline, no_sanitize("thread", "coverage")))
#else
#define EMULATOR_UNCOUNTED __attribute__((noinline, no_sanitize("thread"), no_sanitize_coverage))
#endif

#define __global__
#define __device__
#define __host__
#define __managed__
#define __grid_constant__
// Not const: Python sets it. "used" keeps the compiler from taking its first value for its only one.
#define __constant__ __attribute__((used))
// thread_local makes a variable of a function static, and keeps a kernel's shared arrays together in
// one block of memory: the module's thread-local storage. Aligned for float4, as a kernel's arrays mostly
// are on a GPU: here those of all the file's kernels lie side by side.
#define __shared__ __attribute__((aligned(16))) thread_local
// All dynamic shared arrays are this one. The launch says how much of it is used.
extern thread_local unsigned char emulator_dynamic_shared[];
#define EMULATOR_DYNAMIC_BYTES (227 * 1024)
#define __forceinline__ inline __attribute__((always_inline))
#define EMULATOR_NOINLINE __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __builtin_assume(condition) static_cast<void>(0)
#define __assume(condition) static_cast<void>(0)
#define __CUDACC__ 1
#define __CUDACC_VER_MAJOR__ 12
#define __CUDACC_VER_MINOR__ 0
#define CUDA_VERSION 12000
#define CUDART_VERSION 12000
#define __CUDA_ARCH__ 800
#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN
#define CUDART_INF __builtin_inf()
#define CUDART_NAN __builtin_nan("")
#define CUDART_PI_F 3.141592654f
#define CUDART_PI 3.1415926535897931e+0

#include "vector_types.h"

// In structures that the host fills.
typedef int cudaError_t;
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
constexpr cudaError_t cudaSuccess = 0;

// Each thread sees its own values: the scheduler sets them when it switches threads. They are const
// so that the compiler neither counts reading them as a memory access nor reads them twice; for that
// blockDim and gridDim are uint3, without the constructors of dim3.
extern "C" {
extern const uint3 threadIdx, blockIdx, blockDim, gridDim;
}
constexpr int warpSize = 32;

#include "device_functions.h"
#include "math_functions.h"
#include "assert.h"
