// Barriers, votes, shuffles and atomics, as declared by CUDA; runtime/ implements them.
#pragma once

extern "C" {
void emulator_barrier(int line);
int emulator_barrier_reduce(int line, int operation, int predicate);
uint64_t emulator_warp(int line, int operation, unsigned mask, uint64_t value, int source, int width);
void emulator_fence(int device);
void emulator_trap(const char* what, int line) __attribute__((noreturn));
}

namespace emulator {
// The order is that of Operation in runtime/collectives.h.
enum { SYNC, SHUFFLE, SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_XOR, BALLOT, ANY, ALL, ACTIVE, MATCH };
enum { COUNT, AND, OR };

template <class T>
inline uint64_t to_bits(T value) {
    static_assert(sizeof(T) <= 8, "a shuffle moves values of at most 8 bytes");
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    return bits;
}

template <class T>
inline T from_bits(uint64_t bits) {
    T value;
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}
}  // namespace emulator

// __builtin_LINE() as a default argument is the line of the caller.
#define EMULATOR_LINE int line = __builtin_LINE()

inline void __syncthreads(EMULATOR_LINE) { emulator_barrier(line); }
inline int __syncthreads_count(int p, EMULATOR_LINE) {
    return emulator_barrier_reduce(line, emulator::COUNT, p);
}
inline int __syncthreads_and(int p, EMULATOR_LINE) {
    return emulator_barrier_reduce(line, emulator::AND, p);
}
inline int __syncthreads_or(int p, EMULATOR_LINE) {
    return emulator_barrier_reduce(line, emulator::OR, p);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATOR_LINE) {
    emulator_warp(line, emulator::SYNC, mask, 0, 0, 32);
}
// Threads take turns, so every write is visible at once: fences only tell which orders are meant.
inline void __threadfence_block() { emulator_fence(0); }
inline void __threadfence() { emulator_fence(1); }
inline void __threadfence_system() { emulator_fence(1); }
inline void __trap(EMULATOR_LINE) { emulator_trap("__trap()", line); }
inline void __nanosleep(unsigned) {}

#define EMULATOR_SHUFFLE(name, operation, argument)                                             \
    template <class T>                                                                          \
    inline T name(unsigned mask, T value, argument, int width = 32, EMULATOR_LINE) {            \
        return emulator::from_bits<T>(emulator_warp(line, emulator::operation, mask,            \
                                                    emulator::to_bits(value), source, width));  \
    }
EMULATOR_SHUFFLE(__shfl_sync, SHUFFLE, int source)
EMULATOR_SHUFFLE(__shfl_up_sync, SHUFFLE_UP, unsigned source)
EMULATOR_SHUFFLE(__shfl_down_sync, SHUFFLE_DOWN, unsigned source)
EMULATOR_SHUFFLE(__shfl_xor_sync, SHUFFLE_XOR, int source)
#undef EMULATOR_SHUFFLE

inline unsigned __ballot_sync(unsigned mask, int p, EMULATOR_LINE) {
    return static_cast<unsigned>(emulator_warp(line, emulator::BALLOT, mask, p != 0, 0, 32));
}
inline int __any_sync(unsigned mask, int p, EMULATOR_LINE) {
    return static_cast<int>(emulator_warp(line, emulator::ANY, mask, p != 0, 0, 32));
}
inline int __all_sync(unsigned mask, int p, EMULATOR_LINE) {
    return static_cast<int>(emulator_warp(line, emulator::ALL, mask, p != 0, 0, 32));
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value, EMULATOR_LINE) {
    return static_cast<unsigned>(
        emulator_warp(line, emulator::MATCH, mask, emulator::to_bits(value), 0, 32));
}
inline unsigned __activemask(EMULATOR_LINE) {
    return static_cast<unsigned>(emulator_warp(line, emulator::ACTIVE, 0, 0, 0, 32));
}

#define EMULATOR_ATOMICS(T)        \
    T atomicAdd(T* address, T value); \
    T atomicExch(T* address, T value);
#define EMULATOR_INTEGER_ATOMICS(T)               \
    EMULATOR_ATOMICS(T)                           \
    T atomicSub(T* address, T value);             \
    T atomicMin(T* address, T value);             \
    T atomicMax(T* address, T value);             \
    T atomicAnd(T* address, T value);             \
    T atomicOr(T* address, T value);              \
    T atomicXor(T* address, T value);             \
    T atomicCAS(T* address, T compare, T value);
EMULATOR_ATOMICS(float)
EMULATOR_ATOMICS(double)
EMULATOR_INTEGER_ATOMICS(int)
EMULATOR_INTEGER_ATOMICS(unsigned int)
EMULATOR_INTEGER_ATOMICS(unsigned long long)
unsigned int atomicInc(unsigned int* address, unsigned int limit);
unsigned int atomicDec(unsigned int* address, unsigned int limit);
#undef EMULATOR_ATOMICS
#undef EMULATOR_INTEGER_ATOMICS


// Those that the runtime does not have, as one counted atomic access and a change that is not counted.
extern "C" void emulator_atomic(void* address, int bytes, void* pc);
namespace emulator {
template <class T, class F>
EMULATOR_UNCOUNTED T change(T* address, F operation) {
    emulator_atomic(address, sizeof(T), __builtin_return_address(0));
    T old = *address;
    T next = operation(old);
    memcpy(static_cast<void*>(address), &next, sizeof(T));  // a pair's operator= would be counted
    return old;
}
}  // namespace emulator
#define EMULATOR_ATOMIC(name, T, expression)                                        \
    inline T name(T* address, T value) {                                            \
        return emulator::change(address, [=](T old) EMULATOR_UNCOUNTED -> T { return expression; }); \
    }
#define EMULATOR_ATOMICS(T)                                      \
    EMULATOR_ATOMIC(atomicMin, T, old < value ? old : value)     \
    EMULATOR_ATOMIC(atomicMax, T, old > value ? old : value)     \
    EMULATOR_ATOMIC(atomicAnd, T, old & value)                   \
    EMULATOR_ATOMIC(atomicOr, T, old | value)                    \
    EMULATOR_ATOMIC(atomicXor, T, old ^ value)
EMULATOR_ATOMICS(long long)
#undef EMULATOR_ATOMICS
inline unsigned short atomicCAS(unsigned short* address, unsigned short compare, unsigned short value) {
    return emulator::change(address, [=](unsigned short old) EMULATOR_UNCOUNTED {
        return old == compare ? value : old;
    });
}
#define atomicAdd_block atomicAdd
#define atomicAdd_system atomicAdd
#define atomicMax_block atomicMax
#define atomicMin_block atomicMin
#define atomicCAS_block atomicCAS
#define atomicCAS_system atomicCAS

#define EMULATOR_REDUCE(name, operation)                                     \
    template <class T>                                                       \
    inline T __reduce_##name##_sync(unsigned mask, T value, EMULATOR_LINE) { \
        T result = value;                                                    \
        int first = 1;                                                       \
        for (int lane = 0; lane < 32; lane++) {                              \
            if (!(mask >> lane & 1)) continue;                               \
            T other = __shfl_sync(mask, value, lane, 32, line);              \
            result = first ? other : operation;                              \
            first = 0;                                                       \
        }                                                                    \
        return result;                                                       \
    }
EMULATOR_REDUCE(add, result + other)
EMULATOR_REDUCE(min, result < other ? result : other)
EMULATOR_REDUCE(max, result < other ? other : result)
EMULATOR_REDUCE(and, result & other)
EMULATOR_REDUCE(or, result | other)
EMULATOR_REDUCE(xor, result ^ other)
#undef EMULATOR_REDUCE
template <class T>
inline unsigned __match_all_sync(unsigned mask, T value, int* all, EMULATOR_LINE) {
    unsigned equal = __match_any_sync(mask, value, line);
    *all = __all_sync(mask, equal == mask, line);
    return *all ? mask : 0;
}

#define EMULATOR_LOAD(name) \
    template <class T>      \
    inline T name(const T* address) { return *address; }
#define EMULATOR_STORE(name)                                   \
    template <class T, class V>                                \
    inline void name(T* address, V value) { *address = value; }
EMULATOR_LOAD(__ldg)
EMULATOR_LOAD(__ldca)
EMULATOR_LOAD(__ldcg)
EMULATOR_LOAD(__ldcs)
EMULATOR_LOAD(__ldcv)
EMULATOR_LOAD(__ldlu)
EMULATOR_STORE(__stcg)
EMULATOR_STORE(__stcs)
EMULATOR_STORE(__stwb)
EMULATOR_STORE(__stwt)
#undef EMULATOR_LOAD
#undef EMULATOR_STORE

// Cycles that mean nothing here: those of the processor.
inline long long clock64() { return static_cast<long long>(__builtin_ia32_rdtsc()); }
#define clock() static_cast<clock_t>(clock64())
