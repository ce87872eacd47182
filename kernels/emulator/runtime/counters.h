// Counts what the accesses of a warp cost, once all its lanes have made them.
//
// The lanes run one after another. Two lanes' accesses belong to one request of the warp when they
// come from the same instruction, executed equally often by both since the warp last synchronised: also
// when they come in different iterations of a loop, where a GPU makes several requests.
#pragma once

#include "sites.h"

// A set of 32-bit keys, at most 32 of them, emptied by a new stamp.
static struct { uint32_t key, stamp; } keys[128];
static uint32_t stamp;

static inline bool is_new(uint32_t key) {
    uint32_t slot = (key * 2654435761u) >> 25;
    while (keys[slot].stamp == stamp) {
        if (keys[slot].key == key) return false;
        slot = (slot + 1) & 127;
    }
    keys[slot] = {key, stamp};
    return true;
}

static void count_sectors(Counts& counts, const Group& group) {
    stamp++;
    uint32_t last = ~0u;
    for (uint32_t rest = group.mask; rest; rest &= rest - 1) {
        uint32_t sector = group.word[__builtin_ctz(rest)] >> 3;  // 32 bytes are 8 words
        if (sector == last) continue;
        last = sector;
        counts.sectors += is_new(sector);
    }
}

// Shared memory has 32 banks of 4 bytes; lanes that want different words of one bank wait for each
// other. Accesses of 8 bytes are served for 16 lanes at a time, those of 16 bytes for 8. (On devices of
// compute capability 7.x for twice as many where all lanes t and t ^ 1, or all t and t ^ 2, want one
// address, says forums.developer.nvidia.com/t/77228; nothing says so of later ones: left out.)
static void count_wavefronts(Counts& counts, const Group& group) {
    int words = counts.bytes > 4 ? counts.bytes / 4 : 1;
    int lanes = words > 4 ? LANES / 4 : LANES / words;
    for (int first = 0; first < LANES; first += lanes) {
        uint32_t part = lanes == LANES ? ~0u : ((1u << lanes) - 1) << first;
        uint8_t wanted[32] = {};
        uint32_t degree = 0;
        stamp++;
        for (uint32_t rest = group.mask & part; rest; rest &= rest - 1) {
            uint32_t word = group.word[__builtin_ctz(rest)];
            if (!is_new(word)) continue;
            for (int i = 0; i < words; i++) {
                uint8_t in_bank = ++wanted[(word + i) & 31];
                if (in_bank > degree) degree = in_bank;
            }
        }
        counts.wavefronts += degree;
        counts.ideal_wavefronts += degree > 0;
        if (degree > counts.conflict_degree) counts.conflict_degree = degree;
    }
}

static void count_request(Counts& counts, const Group& group) {
    if (group.mask == 0) return;
    int active = __builtin_popcount(group.mask);
    counts.accesses += active;
    counts.requests++;
    counts.inactive_lanes += LANES - active;
    if (counts.kind == SHARED_LOAD || counts.kind == SHARED_STORE || counts.kind == SHARED_ATOMIC)
        count_wavefronts(counts, group);
    else
        count_sectors(counts, group);
}

static void count_step(Counts& counts, const Step& step) {
    counts.divergent += step.divergent;
    if (step.carried || step.mask == 0) return;
    int active = __builtin_popcount(step.mask);
    counts.accesses += active;
    counts.requests++;
    counts.inactive_lanes += LANES - active;
}

static void count_first(Site& site, uint32_t number) {
    if (site.counts.kind == STEP)
        for (uint32_t i = 0; i < number; i++) count_step(site.counts, site.steps[i]);
    else
        for (uint32_t i = 0; i < number; i++) count_request(site.counts, site.groups[i]);
}

static __attribute__((noinline)) void open_place(Site& site, uint32_t index) {
    if (index >= site.capacity) grow(site);
    if (site.counts.kind == STEP) site.steps[index] = {};
    else site.groups[index].mask = 0;
    site.used = index + 1;
}

static inline uint32_t place_in(Site& site) {
    uint32_t index = site.count[state.lane]++;
    if (__builtin_expect(index >= site.used, 0)) open_place(site, index);
    return index;
}

static inline void record_access(Site& site, uint64_t word) {
    uint32_t place = place_in(site);
    Group& group = site.groups[place];
    group.mask |= 1u << state.lane;
    group.word[state.lane] = static_cast<uint32_t>(word);
}

// The current thread leaves its basic block for another one. A warp whose lanes differ diverges.
static inline void record_successor(uint16_t successor) {
    Thread& thread = *state.current;
    if (thread.step_site == NO_SITE) return;
    Step& step = state.sites[thread.step_site].steps[thread.step_index];
    if (step.successor == 0) step.successor = successor;
    else if (step.successor != successor) step.divergent = 1;
}

static inline void enter_step(uint16_t index, bool carried) {
    Site& site = state.sites[index];
    uint32_t place = place_in(site);
    site.steps[place].mask |= 1u << state.lane;
    site.steps[place].carried |= carried;
    state.current->step_site = index;
    state.current->step_index = place;
}

static void record_exit() {
    if (!state.launch->counting) return;
    record_successor(EXIT_SITE);
    state.current->step_site = NO_SITE;
}

// All lanes have synchronised: everything so far is complete, and counting starts anew.
static void flush_warp(int first, int last) {
    if (!state.launch->counting) return;
    for (int i = 1; i <= state.num_sites; i++) {
        Site& site = state.sites[i];
        if (site.used == 0) continue;
        count_first(site, site.used);
        site.used = 0;
        memset(site.count, 0, sizeof site.count);
    }
    // Each lane is still within a basic block, whose end is yet to be seen.
    for (int i = first; i < last; i++) {
        if (state.threads[i].step_site == NO_SITE) continue;
        state.current = &state.threads[i];
        state.lane = i % LANES;
        enter_step(state.threads[i].step_site, true);
    }
    state.current = nullptr;
}

// Lanes are in the middle of their work: count what none of them can add to any more.
static void slide_warp(int first, int last) {
    if (!state.launch->counting) return;
    for (int s = 1; s <= state.num_sites; s++) {
        Site& site = state.sites[s];
        uint32_t done = site.used;
        for (int i = first; i < last; i++)
            if (state.threads[i].status == READY && site.count[i % LANES] < done)
                done = site.count[i % LANES];
        // The block that a lane is in counts as unfinished: its successor is not known.
        if (site.counts.kind == STEP && done > 0) done--;
        if (done == 0) continue;
        count_first(site, done);
        if (site.counts.kind == STEP)
            memmove(site.steps, site.steps + done, (site.used - done) * sizeof(Step));
        else
            memmove(site.groups, site.groups + done, (site.used - done) * sizeof(Group));
        site.used -= done;
        for (int i = first; i < last; i++) {
            uint32_t& count = site.count[i % LANES];
            count = count > done ? count - done : 0;
            Thread& thread = state.threads[i];
            if (thread.step_site != s) continue;
            if (thread.step_index >= done) thread.step_index -= done;
            else thread.step_site = NO_SITE;
        }
    }
}
