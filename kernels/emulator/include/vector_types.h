// float4 and its like: aligned as on the GPU, so that one of them is one access of 8 or 16 bytes.
#pragma once

namespace emulator {
// A type of this size that is loaded and stored at once, whatever is there.
template <int bytes>
struct Whole { typedef unsigned char Bits __attribute__((vector_size(bytes), may_alias)); };
}  // namespace emulator

// Assignment is spelled out because the compiler does not report a store of a function's result
// (*p = f(), with a structure) otherwise.
#define EMULATOR_ASSIGNMENT(type)                              \
    inline type& operator=(const type& other) {                \
        using Bits = typename emulator::Whole<sizeof(type)>::Bits; \
        *reinterpret_cast<Bits*>(this) = *reinterpret_cast<const Bits*>(&other);  \
        return *this;                                          \
    }
#define EMULATOR_VECTOR(type, scalar, align2, align4)                                        \
    struct type##1 { scalar x; };                                                            \
    struct alignas(align2) type##2 { scalar x, y; EMULATOR_ASSIGNMENT(type##2) };            \
    struct type##3 { scalar x, y, z; };                                                      \
    struct alignas(align4) type##4 { scalar x, y, z, w; EMULATOR_ASSIGNMENT(type##4) };      \
    static inline type##1 make_##type##1(scalar x) { return {x}; }                           \
    static inline type##2 make_##type##2(scalar x, scalar y) { return {x, y}; }              \
    static inline type##3 make_##type##3(scalar x, scalar y, scalar z) { return {x, y, z}; } \
    static inline type##4 make_##type##4(scalar x, scalar y, scalar z, scalar w) {           \
        return {x, y, z, w};                                                                 \
    }

EMULATOR_VECTOR(char, signed char, 2, 4)
EMULATOR_VECTOR(uchar, unsigned char, 2, 4)
EMULATOR_VECTOR(short, short, 4, 8)
EMULATOR_VECTOR(ushort, unsigned short, 4, 8)
EMULATOR_VECTOR(int, int, 8, 16)
EMULATOR_VECTOR(uint, unsigned int, 8, 16)
EMULATOR_VECTOR(longlong, long long, 16, 16)
EMULATOR_VECTOR(ulonglong, unsigned long long, 16, 16)
EMULATOR_VECTOR(float, float, 8, 16)
EMULATOR_VECTOR(double, double, 16, 16)
#undef EMULATOR_VECTOR

struct dim3 {
    unsigned int x, y, z;
    constexpr dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};
