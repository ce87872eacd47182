// CUDA's mathematical functions that C++ does not have. The fast ones (__expf) are computed in full
// precision: the emulator shows what a kernel computes, not the last bits that a GPU would give.
#pragma once

// As in CUDA, both of one type or signed with unsigned; not templates, so that they are preferred to
// those of namespace std under "using namespace std".
#define EMULATOR_MINMAX_OF(R, A, B)                                                             \
    static inline constexpr R min(A a, B b) {                                                   \
        return static_cast<R>(b) < static_cast<R>(a) ? static_cast<R>(b) : static_cast<R>(a);   \
    }                                                                                           \
    static inline constexpr R max(A a, B b) {                                                   \
        return static_cast<R>(a) < static_cast<R>(b) ? static_cast<R>(b) : static_cast<R>(a);   \
    }
#define EMULATOR_MINMAX(T)                          \
    EMULATOR_MINMAX_OF(T, T, T)                     \
    EMULATOR_MINMAX_OF(unsigned T, unsigned T, unsigned T) \
    EMULATOR_MINMAX_OF(unsigned T, T, unsigned T)   \
    EMULATOR_MINMAX_OF(unsigned T, unsigned T, T)
EMULATOR_MINMAX(int)
EMULATOR_MINMAX(long)
EMULATOR_MINMAX(long long)
#undef EMULATOR_MINMAX
#undef EMULATOR_MINMAX_OF
#define EMULATOR_MINMAX(R, A, B)                                              \
    static inline R min(A a, B b) { return __builtin_fmin(a, b); }            \
    static inline R max(A a, B b) { return __builtin_fmax(a, b); }
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
EMULATOR_MINMAX(double, double, double)
EMULATOR_MINMAX(double, float, double)
EMULATOR_MINMAX(double, double, float)
#undef EMULATOR_MINMAX

// Macros where the C library has, or may get, a function of this name.
#define rsqrtf(x) emulator::reciprocal_root<float>(x)
#define rsqrt(x) emulator::reciprocal_root(x)
#define __expf(x) expf(x)
#define __exp10f(x) powf(10.0f, x)
#define exp10f(x) powf(10.0f, x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __sincosf(x, s, c) sincosf(x, s, c)

namespace emulator {
template <class T>
inline std::enable_if_t<std::is_floating_point_v<T>, T> reciprocal_root(T x) {
    return T(1) / static_cast<T>(::sqrt(x));
}
inline double reciprocal_root(int x) { return reciprocal_root<double>(x); }
}  // namespace emulator

// Rounding other than to the nearest is left out of the arithmetic: the last bit may differ.
#define EMULATOR_ROUNDINGS(declare) declare(rn) declare(rz) declare(ru) declare(rd)
#define EMULATOR_ARITHMETIC(mode)                                                          \
    static inline float __fadd_##mode(float x, float y) { return x + y; }                  \
    static inline float __fsub_##mode(float x, float y) { return x - y; }                  \
    static inline float __fmul_##mode(float x, float y) { return x * y; }                  \
    static inline float __fdiv_##mode(float x, float y) { return x / y; }                  \
    static inline float __frcp_##mode(float x) { return 1.0f / x; }                        \
    static inline float __fsqrt_##mode(float x) { return sqrtf(x); }                       \
    static inline float __fmaf_##mode(float x, float y, float z) { return fmaf(x, y, z); } \
    static inline double __dadd_##mode(double x, double y) { return x + y; }               \
    static inline double __dsub_##mode(double x, double y) { return x - y; }               \
    static inline double __dmul_##mode(double x, double y) { return x * y; }               \
    static inline double __ddiv_##mode(double x, double y) { return x / y; }               \
    static inline double __drcp_##mode(double x) { return 1.0 / x; }                       \
    static inline double __dsqrt_##mode(double x) { return sqrt(x); }                      \
    static inline double __fma_##mode(double x, double y, double z) { return fma(x, y, z); } \
    static inline float __double2float_##mode(double x) { return static_cast<float>(x); }  \
    static inline float __int2float_##mode(int x) { return static_cast<float>(x); }        \
    static inline float __uint2float_##mode(unsigned x) { return static_cast<float>(x); }  \
    static inline float __ll2float_##mode(long long x) { return static_cast<float>(x); }   \
    static inline double __ll2double_##mode(long long x) { return static_cast<double>(x); }
EMULATOR_ROUNDINGS(EMULATOR_ARITHMETIC)
#define EMULATOR_TO_WHOLE(mode, round)                                                     \
    static inline int __float2int_##mode(float x) { return static_cast<int>(round(x)); }   \
    static inline unsigned __float2uint_##mode(float x) { return static_cast<unsigned>(round(x)); } \
    static inline long long __float2ll_##mode(float x) { return static_cast<long long>(round(x)); } \
    static inline int __double2int_##mode(double x) { return static_cast<int>(round(x)); } \
    static inline unsigned __double2uint_##mode(double x) { return static_cast<unsigned>(round(x)); } \
    static inline long long __double2ll_##mode(double x) { return static_cast<long long>(round(x)); }
EMULATOR_TO_WHOLE(rn, rint)
EMULATOR_TO_WHOLE(rz, trunc)
EMULATOR_TO_WHOLE(ru, ceil)
EMULATOR_TO_WHOLE(rd, floor)
#undef EMULATOR_ROUNDINGS
#undef EMULATOR_ARITHMETIC
#undef EMULATOR_TO_WHOLE
static inline float __fdividef(float x, float y) { return x / y; }
static inline float fdividef(float x, float y) { return x / y; }
static inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
static inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
static inline double __int2double_rn(int x) { return x; }
static inline double __uint2double_rn(unsigned x) { return x; }
static inline float rcbrtf(float x) { return 1.0f / cbrtf(x); }
static inline float sinpif(float x) { return static_cast<float>(sin(M_PI * x)); }
static inline float cospif(float x) { return static_cast<float>(cos(M_PI * x)); }
static inline double sinpi(double x) { return sin(M_PI * x); }
static inline double cospi(double x) { return cos(M_PI * x); }
static inline float normcdff(float x) { return static_cast<float>(0.5 * erfc(-x * M_SQRT1_2)); }
static inline double normcdf(double x) { return 0.5 * erfc(-x * M_SQRT1_2); }
static inline float norm3df(float x, float y, float z) { return sqrtf(x * x + y * y + z * z); }
static inline float rnorm3df(float x, float y, float z) { return 1.0f / norm3df(x, y, z); }
static inline float rhypotf(float x, float y) { return 1.0f / hypotf(x, y); }

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
static inline int __clzll(long long x) {
    return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64;
}
EMULATOR_UNCOUNTED inline unsigned long long __brevll(unsigned long long x) {
    unsigned long long reversed = 0;
    for (int i = 0; i < 64; i++) reversed |= (x >> i & 1) << (63 - i);
    return reversed;
}
static inline unsigned __brev(unsigned x) { return static_cast<unsigned>(__brevll(x) >> 32); }
EMULATOR_UNCOUNTED inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++)
        result |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return result;
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (shift & 31) >> 32);
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
static inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>((static_cast<uint64_t>(a) * b) >> 32);
}
static inline int __mulhi(int a, int b) { return static_cast<int>((static_cast<int64_t>(a) * b) >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
// As a GPU multiplies: the low 24 bits of each.
static inline int __mul24(int a, int b) {
    return static_cast<int>(static_cast<unsigned>((a << 8 >> 8)) * static_cast<unsigned>(b << 8 >> 8));
}
static inline unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffffu) * (b & 0xffffffu); }
static inline unsigned __sad(int a, int b, unsigned c) {
    return c + static_cast<unsigned>(a < b ? b - a : a - b);
}
EMULATOR_UNCOUNTED inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 32; i += 8) c += static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i);
    return c;
}
static inline int __float_as_int(float x) { return static_cast<int>(emulator::to_bits(x)); }
static inline unsigned __float_as_uint(float x) {
    return static_cast<unsigned>(emulator::to_bits(x));
}
static inline float __int_as_float(int x) { return emulator::from_bits<float>(emulator::to_bits(x)); }
static inline float __uint_as_float(unsigned x) {
    return emulator::from_bits<float>(emulator::to_bits(x));
}
static inline long long __double_as_longlong(double x) {
    return static_cast<long long>(emulator::to_bits(x));
}
static inline double __longlong_as_double(long long x) {
    return emulator::from_bits<double>(emulator::to_bits(x));
}
static inline int __double2hiint(double x) { return static_cast<int>(emulator::to_bits(x) >> 32); }
static inline int __double2loint(double x) { return static_cast<int>(emulator::to_bits(x)); }
static inline double __hiloint2double(int high, int low) {
    return emulator::from_bits<double>(static_cast<uint64_t>(static_cast<unsigned>(high)) << 32 |
                                       static_cast<unsigned>(low));
}
