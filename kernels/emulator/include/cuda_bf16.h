// __nv_bfloat16 and __nv_bfloat162.
#pragma once

#include "narrow_float.h"

#define __CUDA_BF16_TYPES_EXIST__
typedef emulator::Narrow<emulator::BFloat16Format> __nv_bfloat16;
typedef emulator::NarrowPair<emulator::BFloat16Format> __nv_bfloat162;
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;
EMULATOR_NAMED(__nv_bfloat16, __nv_bfloat162, bfloat16, bfloat162, bfloat162)
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
