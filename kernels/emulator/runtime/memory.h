// Every access of the kernel comes through here before it happens.
//
// The compiler inserts the calls (-fsanitize=thread, whose own runtime is not linked), with the
// address; the return address tells which instruction it is.
#pragma once

#include "counters.h"
#include "fibers.h"
#include "races.h"
#include "spins.h"

// The region that an address outside of all is nearest to, to name it in the message.
static int nearest_region(uint64_t address) {
    int best = 0;
    uint64_t best_distance = ~0ull;
    for (int i = 1; i < state.num_regions; i++) {
        const Region& region = state.regions[i];
        uint64_t distance = address < region.base ? region.base - address
                            : address >= region.base + region.bytes
                                ? address - (region.base + region.bytes)
                                : 0;
        if (distance < best_distance) {
            best_distance = distance;
            best = i;
        }
    }
    return best;
}

[[noreturn]] static __attribute__((noinline)) void fail_access(FailureKind kind, int region,
                                                               uint64_t address, int bytes,
                                                               bool write, uint64_t pc) {
    Failure& failure = *state.failure;
    failure.region = region - 1;
    failure.address = address;
    failure.detail = bytes;
    failure.write = write;
    failure.pc = pc;
    fail(kind);
}

static inline void count_down() {
    if (__builtin_expect(--state.budget <= 0, 0)) back_to_scheduler();
}

static inline bool contains(const Region& region, uint64_t address, int bytes) {
    return region.bytes >= static_cast<uint64_t>(bytes) &&
           address - region.base <= region.bytes - bytes;
}

// Makes the record of this instruction for the region that it accesses for the first time; LOCAL_SITE:
// the thread's own stack, which no one else sees.
static __attribute__((noinline)) uint16_t first_access(uint64_t address, int bytes, bool write, bool atomic, uint64_t pc) {
    if (on_stack(address)) return LOCAL_SITE;
    int i = 1;
    while (i < state.num_regions && !contains(state.regions[i], address, bytes)) i++;
    if (i == state.num_regions)
        fail_access(OUT_OF_BOUNDS, nearest_region(address), address, bytes, write, pc);
    if (state.regions[i].shared == GUARD) return LOCAL_SITE;
    bool shared = state.regions[i].shared == SHARED;
    Kind kind = atomic  ? (shared ? SHARED_ATOMIC : GLOBAL_ATOMIC)
                : write ? (shared ? SHARED_STORE : GLOBAL_STORE)
                        : (shared ? SHARED_LOAD : GLOBAL_LOAD);
    return new_site(pc, kind, bytes, i);
}

// `strength` is 0 for a plain access, or a flag of races.h; `reads`: also where it writes.
static __attribute__((always_inline)) inline void record(uint64_t address, int bytes, bool write,
                                                         uint16_t strength, bool reads,
                                                         uint64_t pc) {
    bool atomic = strength == ATOMIC;
    uint16_t index = state.site_of[pc - state.text_base];
    while (__builtin_expect(address - state.sites[index].base > state.sites[index].limit, 0)) {
        index = index == NO_SITE ? first_access(address, bytes, write, atomic, pc)
                                 : state.sites[index].next;
        if (index == LOCAL_SITE) return;
    }
    Site& site = state.sites[index];
    if (__builtin_expect(address & (bytes - 1), 0))
        fail_access(MISALIGNED, site.counts.region + 1, address, bytes, write, pc);
    check_race(site, address, bytes, write, strength, reads, pc);
    if (strength) exchange_orders(address, bytes, is_shared(site), reads, write);
    // Shared memory is counted from the start of its array, so that bank 0 is where it begins.
    uint64_t origin = is_shared(site) ? site.base : 0;
    record_access(site, (address - origin) >> 2);
}

// Not inlined, as nothing of theirs may lie on the stack that spins.h compares.
static __attribute__((noinline)) void record_volatile(uint64_t address, int bytes, bool write,
                                                      uint64_t pc) {
    record(address, bytes, write, VOLATILE, !write, pc);
}

static __attribute__((noinline)) void record_atomic(uint64_t address, int bytes, bool reads,
                                                    uint64_t pc) {
    record(address, bytes, true, ATOMIC, reads, pc);
}

static void record_range(uint64_t address, uint64_t bytes, bool write, uint64_t pc) {
    // A structure without a size of its own on the GPU is moved in pieces of its alignment.
    uint64_t piece = (address | bytes) & 7 ? ((address | bytes) & 3 ? 1 : 4) : 8;
    for (uint64_t i = 0; i < bytes; i += piece)
        record(address + i, static_cast<int>(piece), write, 0, !write, pc);
}

#define RETURN_ADDRESS reinterpret_cast<uint64_t>(__builtin_return_address(0))
#define HOOK(name, bytes, write)                                                             \
    extern "C" void __tsan_##name(void* address) {                                           \
        record(reinterpret_cast<uint64_t>(address), bytes, write, 0, !(write), RETURN_ADDRESS); \
    }
#define VOLATILE_HOOK(name, bytes, write)                                                    \
    extern "C" void __tsan_##name(void* address) {                                           \
        uint64_t pc = RETURN_ADDRESS;                                                        \
        if (!(write) && (bytes) <= 8) watch_poll(reinterpret_cast<uint64_t>(address), bytes, pc); \
        record_volatile(reinterpret_cast<uint64_t>(address), bytes, write, pc);              \
    }
#define HOOKS(HOOK, prefix)                                                   \
    HOOK(prefix##read2, 2, false) HOOK(prefix##read4, 4, false)               \
    HOOK(prefix##read8, 8, false) HOOK(prefix##read16, 16, false)             \
    HOOK(prefix##write2, 2, true) HOOK(prefix##write4, 4, true)               \
    HOOK(prefix##write8, 8, true) HOOK(prefix##write16, 16, true)
HOOK(read1, 1, false)
HOOK(write1, 1, true)
HOOKS(HOOK, )
HOOKS(HOOK, unaligned_)
HOOKS(VOLATILE_HOOK, volatile_)
VOLATILE_HOOK(volatile_read1, 1, false)
VOLATILE_HOOK(volatile_write1, 1, true)

extern "C" {
void __tsan_read_range(void* address, uint64_t bytes) {
    record_range(reinterpret_cast<uint64_t>(address), bytes, false, RETURN_ADDRESS);
}
void __tsan_write_range(void* address, uint64_t bytes) {
    record_range(reinterpret_cast<uint64_t>(address), bytes, true, RETURN_ADDRESS);
}
void* __tsan_memcpy(void* to, const void* from, uint64_t bytes) {
    record_range(reinterpret_cast<uint64_t>(from), bytes, false, RETURN_ADDRESS);
    record_range(reinterpret_cast<uint64_t>(to), bytes, true, RETURN_ADDRESS);
    return memcpy(to, from, bytes);
}
void* __tsan_memset(void* to, int value, uint64_t bytes) {
    record_range(reinterpret_cast<uint64_t>(to), bytes, true, RETURN_ADDRESS);
    return memset(to, value, bytes);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

// -fsanitize-coverage=trace-pc: a basic block begins.
void __sanitizer_cov_trace_pc() {
    if (state.current == nullptr) return;
    uint64_t pc = RETURN_ADDRESS;
    uint16_t site = state.site_of[pc - state.text_base];
    if (__builtin_expect(site == NO_SITE, 0)) site = new_site(pc, STEP, 0, 0);
    record_successor(site);
    enter_step(site, false);
    count_down();
}

// -fsanitize=bounds: an index of an array of known size is outside of it.
struct SourceLocation {
    const char* file;
    uint32_t line, column;
};
void __ubsan_handle_out_of_bounds(SourceLocation* location, uint64_t index) {
    state.failure->text = location->file;
    state.failure->line = static_cast<int>(location->line);
    state.failure->detail = static_cast<int64_t>(index);
    fail(INDEX);
}
}
