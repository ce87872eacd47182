// Atomic operations. Threads take turns, so plain reading and writing is atomic here.
#pragma once

#include <algorithm>

#include "memory.h"

// `reads`: what the operation stores depends on what was there.
template <class T, class F>
static inline T change(T* address, bool reads, uint64_t pc, F&& operation) {
    watch_poll(reinterpret_cast<uint64_t>(address), sizeof(T), pc);
    if (state.launch->counting)
        record_atomic(reinterpret_cast<uint64_t>(address), sizeof(T), reads, pc);
    T old = *address;
    *address = operation(old);
    return old;
}

#define ATOMIC_OPERATION(T, name, expression)                            \
    T name(T* address, T value) {                                        \
        return change(address, true, RETURN_ADDRESS,                     \
                      [=](T old) { return static_cast<T>(expression); }); \
    }
#define ATOMICS(T)                                                          \
    ATOMIC_OPERATION(T, atomicAdd, old + value)                             \
    T atomicExch(T* address, T value) {                                     \
        return change(address, false, RETURN_ADDRESS, [=](T) { return value; }); \
    }
#define INTEGER_ATOMICS(T)                                                          \
    ATOMICS(T)                                                                      \
    ATOMIC_OPERATION(T, atomicSub, old - value)                                     \
    ATOMIC_OPERATION(T, atomicMin, std::min(old, value))                            \
    ATOMIC_OPERATION(T, atomicMax, std::max(old, value))                            \
    ATOMIC_OPERATION(T, atomicAnd, old & value)                                     \
    ATOMIC_OPERATION(T, atomicOr, old | value)                                      \
    ATOMIC_OPERATION(T, atomicXor, old ^ value)                                     \
    T atomicCAS(T* address, T compare, T value) {                                   \
        if (state.launch->counting)                                                 \
            check_guesses(reinterpret_cast<uint64_t>(address), sizeof(T));          \
        return change(address, true, RETURN_ADDRESS,                                \
                      [=](T old) { return old == compare ? value : old; });         \
    }
ATOMICS(float)
ATOMICS(double)
INTEGER_ATOMICS(int)
INTEGER_ATOMICS(unsigned int)
INTEGER_ATOMICS(unsigned long long)
ATOMIC_OPERATION(unsigned int, atomicInc, old >= value ? 0 : old + 1)
ATOMIC_OPERATION(unsigned int, atomicDec, old == 0 || old > value ? value : old - 1)

// For those that include/ makes itself, such as that of a half.
extern "C" void emulator_atomic(void* address, int bytes, void* pc) {
    const uint64_t pc_ = reinterpret_cast<uint64_t>(pc);
    watch_poll(reinterpret_cast<uint64_t>(address), bytes, pc_);
    if (state.launch->counting)
        record_atomic(reinterpret_cast<uint64_t>(address), bytes, true, pc_);
}
