// A number of 16 bits, computed with in float as a GPU's half and bfloat16 are: each operation rounds
// once, to the nearest, ties to even. cuda_fp16.h and cuda_bf16.h name its two formats.
#pragma once

namespace emulator {
struct HalfFormat {
    EMULATOR_UNCOUNTED static uint16_t encode(float value) {
        uint32_t bits = static_cast<uint32_t>(to_bits(value)), sign = bits >> 16 & 0x8000u;
        bits &= 0x7fffffffu;
        if (bits > 0x7f800000u) return 0x7fff;
        if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
        if (bits < 0x38800000u) {  // below the smallest normal half: 0.5f has its last bit where they do
            float shifted = from_bits<float>(bits) + 0.5f;
            return static_cast<uint16_t>(sign | (to_bits(shifted) - 0x3f000000u));
        }
        bits += 0xfffu + (bits >> 13 & 1);
        return static_cast<uint16_t>(sign | (bits - 0x38000000u) >> 13);
    }
    EMULATOR_UNCOUNTED static float decode(uint16_t bits) {
        uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, rest = bits & 1023;
        if (exponent == 0) {
            float small = static_cast<float>(rest) * 0x1p-24f;
            return sign ? -small : small;
        }
        return from_bits<float>(sign | (exponent == 31 ? 255u : exponent + 112) << 23 | rest << 13);
    }
};

struct BFloat16Format {
    EMULATOR_UNCOUNTED static uint16_t encode(float value) {
        uint32_t bits = static_cast<uint32_t>(to_bits(value));
        if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
        return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
    }
    EMULATOR_UNCOUNTED static float decode(uint16_t bits) {
        return from_bits<float>(static_cast<uint64_t>(bits) << 16);
    }
};

#define EMULATOR_NARROW_OPERATOR(op)                                                      \
    friend inline Narrow operator op(Narrow a, Narrow b) { return Narrow(float(a) op float(b)); } \
    friend inline Narrow& operator op##=(Narrow & a, Narrow b) { return a = a op b; }
#define EMULATOR_NARROW_COMPARISON(op) \
    friend inline bool operator op(Narrow a, Narrow b) { return float(a) op float(b); }
template <class Format>
struct Narrow {
    uint16_t bits;
    Narrow() = default;
    template <class N, class = std::enable_if_t<std::is_arithmetic_v<N>>>
    Narrow(N value) : bits(Format::encode(static_cast<float>(value))) {}
    template <class Other>
    explicit Narrow(Narrow<Other> value) : Narrow(static_cast<float>(value)) {}
    template <class N, class = std::enable_if_t<std::is_arithmetic_v<N>>>
    Narrow& operator=(N value) { return *this = Narrow(value); }
    operator float() const { return Format::decode(bits); }
    static Narrow of_bits(uint16_t bits) {
        Narrow result;
        result.bits = bits;
        return result;
    }
    EMULATOR_NARROW_OPERATOR(+)
    EMULATOR_NARROW_OPERATOR(-)
    EMULATOR_NARROW_OPERATOR(*)
    EMULATOR_NARROW_OPERATOR(/)
    EMULATOR_NARROW_COMPARISON(==)
    EMULATOR_NARROW_COMPARISON(!=)
    EMULATOR_NARROW_COMPARISON(<)
    EMULATOR_NARROW_COMPARISON(>)
    EMULATOR_NARROW_COMPARISON(<=)
    EMULATOR_NARROW_COMPARISON(>=)
    friend inline Narrow operator-(Narrow a) { return of_bits(a.bits ^ 0x8000u); }
    friend inline Narrow operator+(Narrow a) { return a; }
    Narrow& operator++() { return *this = *this + Narrow(1.0f); }
};
#undef EMULATOR_NARROW_OPERATOR
#undef EMULATOR_NARROW_COMPARISON

#define EMULATOR_NARROW_OPERATOR(op)                                                           \
    friend inline NarrowPair operator op(NarrowPair a, NarrowPair b) { return {a.x op b.x, a.y op b.y}; } \
    friend inline NarrowPair& operator op##=(NarrowPair & a, NarrowPair b) { return a = a op b; }
template <class Format>
struct alignas(4) NarrowPair {
    Narrow<Format> x, y;
    NarrowPair() = default;
    NarrowPair(const NarrowPair&) = default;
    NarrowPair(Narrow<Format> x, Narrow<Format> y) : x(x), y(y) {}
    EMULATOR_ASSIGNMENT(NarrowPair)
    EMULATOR_NARROW_OPERATOR(+)
    EMULATOR_NARROW_OPERATOR(-)
    EMULATOR_NARROW_OPERATOR(*)
    EMULATOR_NARROW_OPERATOR(/)
    friend inline NarrowPair operator-(NarrowPair a) { return {-a.x, -a.y}; }
    friend inline bool operator==(NarrowPair a, NarrowPair b) { return a.x == b.x && a.y == b.y; }
    friend inline bool operator!=(NarrowPair a, NarrowPair b) { return !(a == b); }
};
#undef EMULATOR_NARROW_OPERATOR
}  // namespace emulator

// The functions that both formats share by name.
#define EMULATOR_NARROW(...) template <class F> inline __VA_ARGS__
#define EMULATOR_N emulator::Narrow<F>
#define EMULATOR_N2 emulator::NarrowPair<F>
#define EMULATOR_BINARY(name, expression)                                                        \
    EMULATOR_NARROW(EMULATOR_N) __h##name(EMULATOR_N a, EMULATOR_N b) { return expression; }      \
    EMULATOR_NARROW(EMULATOR_N2) __h##name##2(EMULATOR_N2 a, EMULATOR_N2 b) {                     \
        return {__h##name(a.x, b.x), __h##name(a.y, b.y)};                                        \
    }
EMULATOR_BINARY(add, a + b)
EMULATOR_BINARY(sub, a - b)
EMULATOR_BINARY(mul, a * b)
EMULATOR_BINARY(add_rn, a + b)
EMULATOR_BINARY(sub_rn, a - b)
EMULATOR_BINARY(mul_rn, a * b)
EMULATOR_BINARY(min, EMULATOR_N(fminf(a, b)))
EMULATOR_BINARY(max, EMULATOR_N(fmaxf(a, b)))
#undef EMULATOR_BINARY
EMULATOR_NARROW(EMULATOR_N) __hdiv(EMULATOR_N a, EMULATOR_N b) { return a / b; }
EMULATOR_NARROW(EMULATOR_N2) __h2div(EMULATOR_N2 a, EMULATOR_N2 b) { return a / b; }
EMULATOR_NARROW(EMULATOR_N) __hneg(EMULATOR_N a) { return -a; }
EMULATOR_NARROW(EMULATOR_N2) __hneg2(EMULATOR_N2 a) { return -a; }
EMULATOR_NARROW(EMULATOR_N) __habs(EMULATOR_N a) { return EMULATOR_N::of_bits(a.bits & 0x7fffu); }
EMULATOR_NARROW(EMULATOR_N2) __habs2(EMULATOR_N2 a) { return {__habs(a.x), __habs(a.y)}; }
// The product is exact in double.
EMULATOR_NARROW(EMULATOR_N) __hfma(EMULATOR_N a, EMULATOR_N b, EMULATOR_N c) {
    return EMULATOR_N(static_cast<float>(double(float(a)) * float(b) + float(c)));
}
EMULATOR_NARROW(EMULATOR_N2) __hfma2(EMULATOR_N2 a, EMULATOR_N2 b, EMULATOR_N2 c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
#define EMULATOR_COMPARISON(name, op)                                                             \
    EMULATOR_NARROW(bool) __h##name(EMULATOR_N a, EMULATOR_N b) { return a op b; }                \
    EMULATOR_NARROW(EMULATOR_N2) __h##name##2(EMULATOR_N2 a, EMULATOR_N2 b) {                      \
        return {EMULATOR_N(a.x op b.x), EMULATOR_N(a.y op b.y)};                                  \
    }
EMULATOR_COMPARISON(eq, ==)
EMULATOR_COMPARISON(ne, !=)
EMULATOR_COMPARISON(lt, <)
EMULATOR_COMPARISON(gt, >)
EMULATOR_COMPARISON(le, <=)
EMULATOR_COMPARISON(ge, >=)
#undef EMULATOR_COMPARISON
EMULATOR_NARROW(bool) __hisnan(EMULATOR_N a) { return a != a; }
EMULATOR_NARROW(int) __hisinf(EMULATOR_N a) { return isinf(float(a)) ? (float(a) > 0 ? 1 : -1) : 0; }
#define EMULATOR_UNARY(name, expression)                                                          \
    EMULATOR_NARROW(EMULATOR_N) h##name(EMULATOR_N a) {                                           \
        float x = a;                                                                              \
        return EMULATOR_N(expression);                                                            \
    }                                                                                             \
    EMULATOR_NARROW(EMULATOR_N2) h2##name(EMULATOR_N2 a) { return {h##name(a.x), h##name(a.y)}; }
EMULATOR_UNARY(exp, expf(x))
EMULATOR_UNARY(exp2, exp2f(x))
EMULATOR_UNARY(exp10, powf(10.0f, x))
EMULATOR_UNARY(log, logf(x))
EMULATOR_UNARY(log2, log2f(x))
EMULATOR_UNARY(log10, log10f(x))
EMULATOR_UNARY(sin, sinf(x))
EMULATOR_UNARY(cos, cosf(x))
EMULATOR_UNARY(tanh, tanhf(x))
EMULATOR_UNARY(sqrt, sqrtf(x))
EMULATOR_UNARY(rsqrt, 1.0f / sqrtf(x))
EMULATOR_UNARY(rcp, 1.0f / x)
EMULATOR_UNARY(floor, floorf(x))
EMULATOR_UNARY(ceil, ceilf(x))
EMULATOR_UNARY(trunc, truncf(x))
EMULATOR_UNARY(rint, rintf(x))
#undef EMULATOR_UNARY
EMULATOR_NARROW(float) __low2float(EMULATOR_N2 a) { return a.x; }
EMULATOR_NARROW(float) __high2float(EMULATOR_N2 a) { return a.y; }
EMULATOR_NARROW(EMULATOR_N2) __lowhigh2highlow(EMULATOR_N2 a) { return {a.y, a.x}; }
EMULATOR_NARROW(EMULATOR_N) atomicAdd(EMULATOR_N* address, EMULATOR_N value) {
    return emulator::change(address, [=](EMULATOR_N old) EMULATOR_UNCOUNTED { return old + value; });
}
EMULATOR_NARROW(EMULATOR_N2) atomicAdd(EMULATOR_N2* address, EMULATOR_N2 value) {
    return emulator::change(address, [=](EMULATOR_N2 old) EMULATOR_UNCOUNTED { return old + value; });
}

// Those that carry the format's name: `one` is "half" or "bfloat16", `two` "half2" or "bfloat162".
#define EMULATOR_NAMED(T, T2, one, two, short_two)                                                \
    inline T __float2##one(float a) { return T(a); }                                              \
    inline T __float2##one##_rn(float a) { return T(a); }                                         \
    inline T __double2##one(double a) { return T(a); }                                            \
    inline T __int2##one##_rn(int a) { return T(a); }                                             \
    inline T __uint2##one##_rn(unsigned a) { return T(a); }                                       \
    inline T __short2##one##_rn(short a) { return T(a); }                                         \
    inline T __ushort2##one##_rn(unsigned short a) { return T(a); }                               \
    inline float __##one##2float(T a) { return a; }                                               \
    inline int __##one##2int_rn(T a) { return static_cast<int>(rintf(a)); }                       \
    inline int __##one##2int_rz(T a) { return static_cast<int>(truncf(a)); }                      \
    inline T __ushort_as_##one(unsigned short a) { return T::of_bits(a); }                        \
    inline T __short_as_##one(short a) { return T::of_bits(static_cast<uint16_t>(a)); }           \
    inline unsigned short __##one##_as_ushort(T a) { return a.bits; }                             \
    inline short __##one##_as_short(T a) { return static_cast<short>(a.bits); }                   \
    inline T2 __float2##two##_rn(float a) { return {T(a), T(a)}; }                                \
    inline T2 __floats2##two##_rn(float a, float b) { return {T(a), T(b)}; }                      \
    inline T2 __float22##two##_rn(float2 a) { return {T(a.x), T(a.y)}; }                          \
    inline float2 __##two##2float2(T2 a) { return {float(a.x), float(a.y)}; }                     \
    inline T2 __##one##2##two(T a) { return {a, a}; }                                             \
    inline T2 make_##short_two(T a, T b) { return {a, b}; }                                       \
    inline T __low2##one(T2 a) { return a.x; }                                                    \
    inline T __high2##one(T2 a) { return a.y; }                                                   \
    inline T2 __low2##two(T2 a) { return {a.x, a.x}; }                                            \
    inline T2 __high2##two(T2 a) { return {a.y, a.y}; }                                           \
    inline T2 __lows2##two(T2 a, T2 b) { return {a.x, b.x}; }                                     \
    inline T2 __highs2##two(T2 a, T2 b) { return {a.y, b.y}; }
