// CUDA's mathematical functions that C++ does not have. The fast ones (__expf) are computed in full
// precision: the emulator shows what a kernel computes, not the last bits that a GPU would give.
#pragma once

#define EMULATOR_MINMAX(T)                                        \
    static inline T min(T a, T b) { return b < a ? b : a; }       \
    static inline T max(T a, T b) { return a < b ? b : a; }
EMULATOR_MINMAX(int)
EMULATOR_MINMAX(unsigned int)
EMULATOR_MINMAX(long)
EMULATOR_MINMAX(unsigned long)
EMULATOR_MINMAX(long long)
EMULATOR_MINMAX(unsigned long long)
#undef EMULATOR_MINMAX
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }

// Macros where the C library has, or may get, a function of this name.
#define rsqrtf(x) emulator::reciprocal_root<float>(x)
#define rsqrt(x) emulator::reciprocal_root<double>(x)
#define __expf(x) expf(x)
#define __exp10f(x) powf(10.0f, x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)

namespace emulator {
template <class T>
inline T reciprocal_root(T x) { return T(1) / static_cast<T>(::sqrt(x)); }
}  // namespace emulator

static inline float __fdividef(float x, float y) { return x / y; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
static inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
static inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>((static_cast<uint64_t>(a) * b) >> 32);
}
static inline int __float_as_int(float x) { return static_cast<int>(emulator::to_bits(x)); }
static inline unsigned __float_as_uint(float x) {
    return static_cast<unsigned>(emulator::to_bits(x));
}
static inline float __int_as_float(int x) { return emulator::from_bits<float>(emulator::to_bits(x)); }
static inline float __uint_as_float(unsigned x) {
    return emulator::from_bits<float>(emulator::to_bits(x));
}
