// half and half2.
#pragma once

#include "narrow_float.h"

#define __CUDA_FP16_TYPES_EXIST__
typedef emulator::Narrow<emulator::HalfFormat> __half;
typedef emulator::NarrowPair<emulator::HalfFormat> __half2;
typedef __half half;
typedef __half2 half2;
typedef __half __nv_half;
typedef __half2 __nv_half2;
EMULATOR_NAMED(__half, __half2, half, half2, half2)
inline __half2 __halves2half2(__half a, __half b) { return {a, b}; }
#define CUDART_INF_FP16 __ushort_as_half(0x7c00)
#define CUDART_ZERO_FP16 __ushort_as_half(0)
#define CUDART_ONE_FP16 __ushort_as_half(0x3c00)
