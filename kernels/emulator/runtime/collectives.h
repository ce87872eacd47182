// Barriers of the block, and operations in which the lanes of a warp see each other's values.
#pragma once

#include "memory.h"

// The order is that of the enumerations in include/device_functions.h.
enum Operation { SYNC, SHUFFLE, SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_XOR, BALLOT, ANY, ALL, ACTIVE, MATCH };
enum Reduction { COUNT, AND, OR };
constexpr int PLAIN_BARRIER = -1;

static uint64_t wait_for_others(Status status, int line, int operation, uint64_t value) {
    Thread& thread = *state.current;
    thread.status = status;
    thread.line = line;
    thread.operation = operation;
    thread.value = value;
    back_to_scheduler();
    return thread.value;
}

// A lane calls an operation with a mask that leaves itself out.
[[noreturn]] static void fail_mask(int line, int operation, unsigned mask) {
    state.failure->line = line;
    state.failure->write = operation;
    state.failure->detail = mask;
    fail(MASK);
}

extern "C" {
void emulator_barrier(int line) { wait_for_others(AT_BARRIER, line, PLAIN_BARRIER, 0); }

int emulator_barrier_reduce(int line, int operation, int predicate) {
    return static_cast<int>(wait_for_others(AT_BARRIER, line, operation, predicate != 0));
}

uint64_t emulator_warp(int line, int operation, unsigned mask, uint64_t value, int source, int width) {
    Thread& thread = *state.current;
    if (operation != ACTIVE && !(mask >> state.lane & 1)) fail_mask(line, operation, mask);
    thread.mask = mask;
    thread.source = source;
    thread.width = width;
    return wait_for_others(AT_WARP, line, operation, value);
}

void emulator_trap(const char* what, int line) {
    state.failure->text = what;
    state.failure->line = line;
    fail(TRAP);
}
}

// The lane whose value a shuffle gives to this lane (CUDA C++ Programming Guide, "Warp Shuffle
// Functions"): within groups of `width` lanes; itself where the other would be outside its group.
static int source_lane(const Thread& thread, int lane) {
    int width = thread.width, first = lane & ~(width - 1), source = lane;
    switch (thread.operation) {
        case SHUFFLE: return first + (thread.source & (width - 1));
        case SHUFFLE_UP: source = lane - thread.source; return source < first ? lane : source;
        case SHUFFLE_DOWN: source = lane + thread.source; return source >= first + width ? lane : source;
        default: source = lane ^ thread.source; return source >= first + width ? lane : source;
    }
}

// A shuffle takes from a lane that has no value to give.
static void find_missing_lane(const Thread* warp, int lane, int source) {
    const Thread& thread = warp[lane];
    int index = static_cast<int>(&warp[source] - state.threads);
    Failure finding = {};
    finding.kind = LANE;
    finding.thread = static_cast<int32_t>(&thread - state.threads);
    finding.region = -1;
    finding.block[0] = blockIdx.x;
    finding.block[1] = blockIdx.y;
    finding.block[2] = blockIdx.z;
    finding.line = thread.line;
    finding.write = thread.operation;
    finding.detail = source;
    finding.other_write = index >= state.num_threads                ? NO_THREAD
                          : !(thread.mask >> source & 1)            ? NOT_IN_MASK
                                                                    : ENDED;
    bool is_new;
    if (!state.launch->listing) fail_with(finding);
    add_finding(finding, 1ull << 61 | static_cast<uint64_t>(thread.line), is_new);
}

static uint64_t result_for(const Thread* warp, int lane, unsigned lanes, const uint64_t* values) {
    const Thread& thread = warp[lane];
    unsigned votes = 0, equal = 0;
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
        int other = __builtin_ctz(rest);
        if (values[other] != 0) votes |= 1u << other;
        if (values[other] == values[lane]) equal |= 1u << other;
    }
    switch (thread.operation) {
        case SYNC: return 0;
        case BALLOT: return votes;
        case ANY: return votes != 0;
        case ALL: return votes == lanes;
        case ACTIVE: return lanes;
        case MATCH: return equal;
    }
    int source = source_lane(thread, lane);
    if (lanes >> source & 1) return values[source];
    find_missing_lane(warp, lane, source);
    return ~0ull;  // undefined
}

// __syncwarp of some lanes: from now on each sees what any of them did or saw before.
static void share_order(Thread* warp, unsigned lanes) {
    uint32_t seen[LANES] = {};
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
        int lane = __builtin_ctz(rest);
        for (int i = 0; i < LANES; i++) seen[i] = std::max(seen[i], warp[lane].seen[i]);
        seen[lane] = state.time;
    }
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
        Thread& thread = warp[__builtin_ctz(rest)];
        memcpy(thread.seen, seen, sizeof seen);
        thread.seen_copy = STALE_COPY;
    }
}

// Completes one warp operation if all lanes named in its mask (but those that have ended) wait in it.
static bool release_warp(int first, int last) {
    Thread* warp = &state.threads[first];
    unsigned alive = 0;
    for (int i = 0; i < last - first; i++)
        if (warp[i].status != DONE) alive |= 1u << i;
    for (int leader = 0; leader < last - first; leader++) {
        if (warp[leader].status != AT_WARP) continue;
        unsigned lanes = 0;
        for (int i = 0; i < last - first; i++)
            if (warp[i].status == AT_WARP && warp[i].line == warp[leader].line &&
                warp[i].operation == warp[leader].operation && warp[i].mask == warp[leader].mask)
                lanes |= 1u << i;
        if (warp[leader].operation != ACTIVE && (warp[leader].mask & alive) != lanes) continue;
        uint64_t values[LANES];
        for (int i = 0; i < last - first; i++) values[i] = warp[i].value;
        state.time++;
        if (lanes == alive) {
            if (warp[leader].operation == SYNC) state.warps[first / LANES].sync_time = state.time;
            flush_warp(first, last);
        }
        for (unsigned rest = lanes; rest; rest &= rest - 1) {
            int lane = __builtin_ctz(rest);
            warp[lane].value = result_for(warp, lane, lanes, values);
        }
        if (warp[leader].operation == SYNC) {
            if (lanes != alive) share_order(warp, lanes);
            share_knowledge(first, last, lanes);
        }
        for (unsigned rest = lanes; rest; rest &= rest - 1) warp[__builtin_ctz(rest)].status = READY;
        return true;
    }
    return false;
}
