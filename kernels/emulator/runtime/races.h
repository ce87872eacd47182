// Two threads of a block race when both access a word, one of them writes it, and nothing between
// orders them: no __syncthreads, and within a warp no __syncwarp. Shuffles and votes order nothing
// ("do not imply a memory barrier", CUDA C++ Programming Guide).
#pragma once

#include "state.h"

constexpr uint16_t ATOMIC = 0x8000;  // set in Shadow::writer by an atomic operation

static inline bool is_ordered(uint32_t time, int other) {
    if (time < state.barrier_time) return true;
    if (other / LANES != state.warp) return false;
    return time < state.warps[state.warp].sync_time || time < state.current->seen[other % LANES];
}

[[noreturn]] static void fail_race(int region, uint64_t address, int bytes, bool write, uint64_t pc,
                                   int other, uint16_t other_site, bool other_write) {
    Failure& failure = *state.failure;
    failure.region = region - 1;
    failure.address = address;
    failure.detail = bytes;
    failure.write = write;
    failure.pc = pc;
    failure.other_thread = other;
    failure.other_pc = state.sites[other_site].counts.pc;
    failure.other_write = other_write;
    fail(RACE);
}

struct Access {
    int region;  // of the site, in a message
    uint64_t address;
    int bytes;
    bool write, atomic;
    uint64_t pc;
    uint16_t site;
};

static void check_word(const Access& access, Shadow& word, uint8_t mask, uint64_t address) {
    uint16_t me = static_cast<uint16_t>(state.current_index);
    uint16_t writer = word.writer & ~ATOMIC;
    bool both_atomic = access.atomic && (word.writer & ATOMIC);
    if (word.write_time >= state.barrier_time && writer != me && (word.write_mask & mask) &&
        !both_atomic && !is_ordered(word.write_time, writer))
        fail_race(access.region, address, access.bytes, access.write, access.pc, writer,
                  word.write_site, true);
    if (access.write) {
        if ((word.read_mask & mask) && word.reader != me && !is_ordered(word.read_time, word.reader))
            fail_race(access.region, address, access.bytes, true, access.pc, word.reader,
                      word.read_site, false);
        if ((word.other_mask & mask) && word.other_reader != me &&
            !is_ordered(word.other_time, word.other_reader))
            fail_race(access.region, address, access.bytes, true, access.pc, word.other_reader,
                      word.other_site, false);
        bool again = word.write_time >= state.barrier_time && writer == me;
        word.write_mask = again ? word.write_mask | mask : mask;
        word.write_time = state.time;
        word.writer = me | (access.atomic ? ATOMIC : 0);
        word.write_site = access.site;
    } else if (word.reader == me || is_ordered(word.read_time, word.reader)) {
        bool again = word.read_time >= state.barrier_time && word.reader == me;
        word.read_mask = again ? word.read_mask | mask : mask;
        word.read_time = state.time;
        word.reader = me;
        word.read_site = access.site;
    } else {
        bool again = word.other_time >= state.barrier_time && word.other_reader == me;
        word.other_mask = again ? word.other_mask | mask : mask;
        word.other_time = state.time;
        word.other_reader = me;
        word.other_site = access.site;
    }
}

// Most often a word that nobody has written since the barrier, and that this warp reads again.
static inline bool is_known_read(const Shadow& word, uint8_t mask) {
    if (word.write_time >= state.barrier_time && word.writer != state.current_index) return false;
    if (word.read_time != state.time || (word.read_mask & mask) != mask) return false;
    return word.reader == state.current_index ||
           (word.other_time == state.time && word.other_reader / LANES == state.warp &&
            (word.other_mask & mask) == mask);
}

static inline Shadow& shadow_of(const Site& site, uint64_t address) {
    return site.shadow[(address >> site.shift) - (site.base >> site.shift)];
}

static inline uint8_t bytes_of_word(const Site& site, uint64_t address, int bytes) {
    if (bytes >= 4 || site.shift == 0) return 15;
    return static_cast<uint8_t>(((1 << bytes) - 1) << (address & 3));
}

static __attribute__((noinline)) void check_words(const Site& site, uint64_t address, int bytes,
                                                  bool write, bool atomic, uint64_t pc) {
    uint16_t index = static_cast<uint16_t>(&site - state.sites);
    Access access = {site.counts.region + 1, address, bytes, write, atomic, pc, index};
    uint8_t mask = bytes_of_word(site, address, bytes);
    for (int i = 0; i < bytes; i += 1 << site.shift)
        check_word(access, shadow_of(site, address + i), mask, address + i);
}

static inline void check_race(const Site& site, uint64_t address, int bytes, bool write, bool atomic,
                              uint64_t pc) {
    if (site.shadow == nullptr) return;
    if (!write && bytes <= 4 && site.shift == 2) {
        uint8_t mask = bytes == 4 ? 15 : bytes_of_word(site, address, bytes);
        if (is_known_read(site.shadow[address / 4 - site.base / 4], mask)) return;
    }
    check_words(site, address, bytes, write, atomic, pc);
}
