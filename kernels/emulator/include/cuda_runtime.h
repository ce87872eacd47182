// What a .cu file needs from CUDA, for a C++ compiler on a CPU.
//
// Included before the kernel's own text (g++ -include), so that the same file is compiled unmodified
// by nvcc and by g++. The functions that touch other threads (barriers, shuffles, atomics) are
// implemented in runtime/; the rest is here. Left out: textures, cooperative groups, inline PTX,
// tensor cores, half and bfloat16, host code.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __constant__ static const
// thread_local makes a variable of a function static, may follow "extern", and keeps a kernel's
// shared arrays together in one block of memory: the module's thread-local storage.
#define __shared__ thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __CUDA_ARCH__ 800
#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN

#include "vector_types.h"

// Each thread sees its own values: the scheduler sets them when it switches threads. They are const
// so that the compiler neither counts reading them as a memory access nor reads them twice; for that
// blockDim and gridDim are uint3, without the constructors of dim3.
extern "C" {
extern const uint3 threadIdx, blockIdx, blockDim, gridDim;
}
constexpr int warpSize = 32;

#include "device_functions.h"
#include "math_functions.h"
