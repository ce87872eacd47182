// What one thread knows of another's accesses through fences and atomics, across blocks and within one.
//
// A thread *releases* by a fence and, after it, an atomic operation or a volatile store. Whoever then
// reads that word by an atomic operation or a volatile load *acquires*: it knows what the first did, or
// had seen, before its fence, and everything that thread had acquired. Barriers hand knowledge on to
// the threads that meet. (PTX asks the second thread for a fence too; the threadfence reduction of
// NVIDIA's samples has none, and is accepted.) A word keeps all its releases, as with a counter that
// each block increments: also where a volatile store replaced what was there.
//
// Blocks run one after another, in order, so only later blocks learn of earlier ones. What is known is
// what this order shows: a kernel that reads a flag and does not look at it is taken for one that waits.
#pragma once

#include <algorithm>
#include <array>
#include <unordered_map>
#include <vector>

#include "state.h"

// What a thread saw of its own block, at some moment.
struct Horizon {
    uint32_t barrier, warp;  // everything before; everything of its warp before
    int32_t lanes;           // entry of seen_copies, from 1; 0: none
};

struct Fence {
    uint32_t time;  // 0: none
    uint16_t thread;
    bool device;    // for all blocks, not for its own alone
    Horizon horizon;
};

struct Release {
    uint32_t time, block_start;
    uint16_t thread;
    Fence fence, device_fence;
    Horizon horizon;
    uint32_t first_fence, last_fence;  // those of the block so far
    uint32_t knowledge;
};

// A word of memory that threads release through.
struct Channel {
    uint32_t block_start;  // of a shared word, which is another one in the next block
    std::vector<Release> releases;
    uint32_t search, searched;
};

// The first `count` releases of a channel, and two other pieces of knowledge.
struct Knowledge {
    uint32_t time;
    uint32_t channel, count;
    uint32_t earlier, other;  // 0: none
    uint32_t search;
};

static std::vector<Fence> fences;
static uint32_t first_fence;  // of this block
static std::vector<std::array<uint32_t, LANES>> seen_copies;
static std::unordered_map<uint64_t, uint32_t> channel_of;
static std::vector<Channel> channels;
static std::vector<Knowledge> knowledge;
static uint32_t search;
static bool learned;  // somebody has acquired since the threads last met

static void clear_orders() {
    fences.clear();
    seen_copies.clear();
    channel_of.clear();
    channels.clear();
    knowledge.assign(1, {});
    learned = false;
}

static void begin_block_s_orders() {
    first_fence = static_cast<uint32_t>(fences.size());
    learned = false;
}

static Horizon horizon() {
    Thread& thread = *state.current;
    if (thread.seen_copy == STALE_COPY) {
        std::array<uint32_t, LANES> copy;
        std::copy(thread.seen, thread.seen + LANES, copy.begin());
        seen_copies.push_back(copy);
        thread.seen_copy = static_cast<int32_t>(seen_copies.size());
    }
    return {state.barrier_time, state.warps[state.warp].sync_time, thread.seen_copy};
}

static bool sees(const Horizon& horizon, int thread, uint32_t time, int other) {
    if (time < horizon.barrier) return true;
    if (thread / LANES != other / LANES) return false;
    return time < horizon.warp ||
           (horizon.lanes > 0 && time < seen_copies[horizon.lanes - 1][other % LANES]);
}

extern "C" void emulator_fence(int device) {
    if (!state.launch->counting) return;
    Thread& thread = *state.current;
    uint16_t me = static_cast<uint16_t>(state.current_index);
    Fence fence = {++state.time, me, device != 0, horizon()};
    // In a loop that waits they would pile up.
    bool again = thread.fence != 0 && thread.fence == fences.size() &&
                 fences.back().device == fence.device &&
                 fences.back().horizon.barrier == fence.horizon.barrier &&
                 fences.back().horizon.warp == fence.horizon.warp &&
                 fences.back().horizon.lanes == fence.horizon.lanes;
    if (again) fences.back() = fence;
    else fences.push_back(fence);
    thread.fence = static_cast<uint32_t>(fences.size());
    if (device) thread.device_fence = thread.fence;
}

static Channel& channel_at(uint64_t address, bool shared, uint32_t& index) {
    auto found = channel_of.find(address);
    if (found == channel_of.end() ||
        (shared && channels[found->second].block_start != state.block_start)) {
        channel_of[address] = index = static_cast<uint32_t>(channels.size());
        channels.push_back({state.block_start, {}, 0, 0});
    } else {
        index = found->second;
    }
    return channels[index];
}

static void acquire(uint64_t address, bool shared) {
    auto found = channel_of.find(address);
    if (found == channel_of.end()) return;
    const Channel& channel = channels[found->second];
    if (shared && channel.block_start != state.block_start) return;
    uint32_t& mine = state.current->knowledge;
    uint32_t count = static_cast<uint32_t>(channel.releases.size());
    const Knowledge& last = knowledge[mine];
    // In a loop that waits, or counts in a word of its own, they would pile up.
    if (last.channel == found->second && last.count + 1 >= count) {
        if (last.count == count) return;
        const Release& added = channel.releases.back();
        if (added.thread == state.current_index && added.block_start == state.block_start) return;
    }
    knowledge.push_back({state.time, found->second, count, mine, 0, 0});
    mine = static_cast<uint32_t>(knowledge.size() - 1);
    learned = true;
}

static Fence fence_numbered(uint32_t number) { return number ? fences[number - 1] : Fence{}; }

static void release(uint64_t address, bool shared) {
    if (fences.size() == first_fence) return;  // none in this block
    const Thread& thread = *state.current;
    uint32_t index;
    std::vector<Release>& releases = channel_at(address, shared, index).releases;
    Release next = {state.time,
                    state.block_start,
                    static_cast<uint16_t>(state.current_index),
                    fence_numbered(thread.fence),
                    fence_numbered(thread.device_fence),
                    horizon(),
                    first_fence,
                    static_cast<uint32_t>(fences.size()),
                    thread.knowledge};
    bool nothing_new = !releases.empty() && releases.back().thread == next.thread &&
                       releases.back().time == next.time &&
                       releases.back().knowledge == next.knowledge;
    if (!nothing_new) releases.push_back(next);
}

// An atomic operation or a volatile access.
static void exchange_orders(uint64_t address, int bytes, bool shared, bool reads, bool writes) {
    if (channels.empty() && fences.size() == first_fence) return;
    for (uint64_t word = address & ~3ull; word < address + bytes; word += 4) {
        if (reads) acquire(word, shared);
        if (writes) release(word, shared);
    }
}

static uint32_t joined(uint32_t a, uint32_t b) {
    if (a == b || b == 0) return a;
    if (a == 0) return b;
    knowledge.push_back({state.time, 0, 0, a, b, 0});
    return static_cast<uint32_t>(knowledge.size() - 1);
}

// Threads first to last (those in `lanes`) have met.
static void share_knowledge(int first, int last, unsigned lanes = ~0u) {
    if (!learned) return;
    uint32_t all = 0;
    for (int i = first; i < last; i++)
        if (lanes >> i % LANES & 1) all = joined(all, state.threads[i].knowledge);
    for (int i = first; i < last; i++)
        if (lanes >> i % LANES & 1) state.threads[i].knowledge = all;
}

// Whether a release passes on what `thread` of its block did at that time.
static bool covers(const Release& release, uint32_t time, int thread) {
    bool own_block = release.block_start == state.block_start;
    const Fence& fence = own_block ? release.fence : release.device_fence;
    if (thread == release.thread ? time < fence.time
                                 : fence.time && sees(fence.horizon, release.thread, time, thread))
        return true;
    // Or that thread had a fence of its own, and then met the releasing one.
    for (uint32_t i = release.first_fence; i < release.last_fence; i++)
        if (fences[i].thread == thread && time < fences[i].time && (own_block || fences[i].device) &&
            sees(release.horizon, release.thread, fences[i].time, thread))
            return true;
    return false;
}

// Looks through the first releases of a channel; those that were made before `time` cannot cover it.
static bool search_channel(Channel& channel, uint32_t count, uint32_t time, int thread,
                           uint32_t block_start, std::vector<uint32_t>& rest) {
    uint32_t begin = channel.search == search ? channel.searched : 0;
    if (begin >= count) return false;
    channel.search = search;
    channel.searched = count;
    auto first = channel.releases.begin();
    auto from = std::upper_bound(first + begin, first + count, time,
                                 [](uint32_t t, const Release& r) { return t < r.time; });
    for (auto r = from; r < first + count && r->block_start == block_start; ++r)
        if (covers(*r, time, thread)) return true;
    for (auto r = from; r < first + count; ++r)
        if (r->knowledge) rest.push_back(r->knowledge);
    return false;
}

// Whether the current thread knows of what `thread` did at that time, in the block that began then.
static __attribute__((noinline)) bool is_known(uint32_t time, int thread, uint32_t block_start) {
    static std::vector<uint32_t> rest;
    rest.assign(1, state.current->knowledge);
    search++;
    while (!rest.empty()) {
        uint32_t index = rest.back();
        rest.pop_back();
        Knowledge& piece = knowledge[index];
        if (index == 0 || piece.time <= time || piece.search == search) continue;
        piece.search = search;
        if (piece.count && search_channel(channels[piece.channel], piece.count, time, thread,
                                          block_start, rest))
            return true;
        rest.push_back(piece.earlier);
        if (piece.other) rest.push_back(piece.other);
    }
    return false;
}
