// Two threads race when both access a word, one of them stores to it, and nothing between orders them.
//
// Orders: __syncthreads, and within a warp __syncwarp (shuffles and votes order nothing: they "do not
// imply a memory barrier", CUDA C++ Programming Guide); between blocks, and within one, what orders.h
// knows. Atomic operations on one word do not race with each other, nor with volatile accesses; nor do
// two volatile ones, unless they are to shared memory and of one warp: "warp-synchronous" code, which
// was right before compute capability 7.0. A word's memory is of the last plain store and of two other
// accesses, so that of many races on one word some are found, not all. A plain load that an atomicCAS of
// the same thread checks at once is no race: so the guide makes an atomicAdd of doubles.
#pragma once

#include "orders.h"

// Flags of a thread in a Shadow.
constexpr uint16_t ATOMIC = 0x8000, VOLATILE = 0x4000, STORED = 0x2000, THREAD = 0x1fff;
constexpr size_t MAX_FINDINGS = 4096;

struct Access {
    int region;  // of the site, in a message
    uint64_t address;
    int bytes;
    bool write, shared;
    uint16_t strength;  // ATOMIC, VOLATILE or 0
    bool reads;         // the value, if it writes
    uint64_t pc;
    uint16_t site;
};

// A store that races, before it happens: whether it stores what is there already shows after it.
struct Unsettled {
    size_t finding;
    uint64_t address;
    int bytes;
    unsigned char before[4];
};

// A load of what nobody has stored, so far.
struct Unwritten {
    Failure finding;
    uint64_t key;
    const Shadow* word;
    uint32_t known_time;
    bool certain;  // an atomic operation, which stores too
};

// A plain load of what others change by atomic operations, which an atomicCAS may still check.
struct Guess {
    Failure race;
    uint64_t key;
};

static std::vector<Failure> findings;
static std::unordered_map<uint64_t, size_t> finding_of;  // by the two instructions and the scope
static std::vector<Unsettled> unsettled;
static std::vector<Unwritten> unwritten;
static std::vector<Guess> guesses;
static std::vector<uint32_t> block_starts;

static void clear_findings() {
    findings.clear();
    finding_of.clear();
    unsettled.clear();
    unwritten.clear();
    guesses.clear();
    block_starts.clear();
    state.unsettled = false;
}

static inline bool is_ordered(uint32_t time, int other) {
    if (time < state.barrier_time) return true;
    if (other / LANES != state.warp) return false;
    return time < state.warps[state.warp].sync_time || time < state.current->seen[other % LANES];
}

static size_t block_at(uint32_t time) {
    auto after = std::upper_bound(block_starts.begin(), block_starts.end(), time);
    return static_cast<size_t>(after - block_starts.begin()) - 1;
}

static inline bool is_mine(uint32_t time, uint16_t other) {
    return (other & THREAD) == state.current_index && time >= state.block_start;
}

static bool is_before(const Access& access, uint32_t time, uint16_t other) {
    if (is_mine(time, other)) return true;
    if (time < state.block_start) {
        if (access.shared) return true;  // of a block whose shared memory is gone
    } else if (is_ordered(time, other & THREAD)) {
        return true;
    }
    return !channels.empty() && is_known(time, other & THREAD, block_starts[block_at(time)]);
}

static bool may_meet(const Access& access, uint32_t time, uint16_t other) {
    if (!access.strength || !(other & (ATOMIC | VOLATILE))) return false;
    if ((access.strength | other) & ATOMIC) return true;
    return !access.shared || time < state.block_start || (other & THREAD) / LANES != state.warp;
}

// An atomic operation on the word after that one, by this thread or before it: it read what the other
// left, so that whatever this thread does to the word comes later (the last block resets a counter).
static bool comes_after(const Access& access, const Shadow& word, uint32_t time) {
    bool reader = word.read_mask && (word.reader & ATOMIC) && word.read_time >= time;
    bool other = word.other_mask && (word.other_reader & ATOMIC) && word.other_time >= time;
    return (reader && is_before(access, word.read_time, word.reader)) ||
           (other && is_before(access, word.other_time, word.other_reader));
}

static bool is_race(const Access& access, const Shadow& word, uint32_t time, uint16_t other) {
    if (may_meet(access, time, other) || is_before(access, time, other)) return false;
    return !(other & ATOMIC) || !comes_after(access, word, time);
}

static void set_place(Failure& failure, const Access& access) {
    failure.region = access.region - 1;
    failure.address = access.address;
    failure.detail = access.bytes;
    failure.write = access.write;
    failure.pc = access.pc;
    failure.thread = state.current_index;
    failure.block[0] = blockIdx.x;
    failure.block[1] = blockIdx.y;
    failure.block[2] = blockIdx.z;
}

[[noreturn]] static void fail_with(const Failure& finding) {
    FailureKind kind = static_cast<FailureKind>(finding.kind);
    *state.failure = finding;
    fail(kind);
}

// Its number among the findings; the same two instructions are named once.
static size_t add_finding(const Failure& finding, uint64_t key, bool& is_new) {
    auto found = finding_of.find(key);
    is_new = found == finding_of.end();
    if (!is_new) return found->second;
    if (findings.size() >= MAX_FINDINGS) return MAX_FINDINGS;
    finding_of[key] = findings.size();
    findings.push_back(finding);
    return findings.size() - 1;
}

// The first time only: whoever loads it again waits for it to change.
static bool may_be_guess(const Access& access, uint16_t other, const Failure& race) {
    if (access.write || access.strength || !(other & ATOMIC)) return false;
    for (const Guess& guess : guesses)
        if (guess.race.thread == race.thread && guess.race.address == race.address) return false;
    return guesses.size() < MAX_FINDINGS;
}

// Before an atomicCAS of this thread.
static __attribute__((noinline)) void check_guesses(uint64_t address, int bytes) {
    const uint64_t size = static_cast<uint64_t>(bytes);
    auto checked = [=](const Guess& guess) {
        return guess.race.thread == state.current_index && guess.race.address - address < size;
    };
    guesses.erase(std::remove_if(guesses.begin(), guesses.end(), checked), guesses.end());
    for (int i = 1; i < state.num_regions; i++) {
        const Region& region = state.regions[i];
        if (state.shadows[i] == nullptr || address - region.base >= region.bytes) continue;
        Shadow* word = state.shadows[i] + ((address >> state.shifts[i]) - (region.base >> state.shifts[i]));
        for (uint64_t at = 0; at < size; at += 1ull << state.shifts[i], word++) {
            if (is_mine(word->read_time, word->reader)) word->reader |= ATOMIC;
            if (is_mine(word->other_time, word->other_reader)) word->other_reader |= ATOMIC;
        }
    }
}

static __attribute__((noinline)) void find_race(const Access& access, uint64_t address, uint32_t time,
                                                uint16_t other, uint16_t other_site, bool stored) {
    Failure race = {};
    race.kind = RACE;
    set_place(race, access);
    race.address = address;
    race.other_thread = other & THREAD;
    race.other_pc = state.sites[other_site].counts.pc;
    race.other_write = stored;
    size_t block = block_at(time);
    race.other_block[0] = static_cast<uint32_t>(block % gridDim.x);
    race.other_block[1] = static_cast<uint32_t>(block / gridDim.x % gridDim.y);
    race.other_block[2] = static_cast<uint32_t>(block / gridDim.x / gridDim.y);
    race.scope = time < state.block_start                      ? BLOCKS
                 : (other & THREAD) / LANES != state.warp ? WARPS
                                                               : WITHIN_WARP;
    bool both_store = access.write && stored && !((access.strength | other) & ATOMIC);
    race.same_value = both_store;
    if (!state.launch->listing && state.unsettled) return;  // the first one is told
    uint64_t pair[2] = {std::min(access.site, other_site), std::max(access.site, other_site)};
    bool is_new;
    uint64_t key = static_cast<uint64_t>(race.scope) << 40 | pair[0] << 20 | pair[1];
    if (may_be_guess(access, other, race)) return guesses.push_back({race, key});
    if (!state.launch->listing && !both_store) fail_with(race);
    size_t number = add_finding(race, key, is_new);
    if (number == MAX_FINDINGS || !both_store || !findings[number].same_value) return;
    Unsettled store = {number, address, std::min(access.bytes, 4), {}};
    memcpy(store.before, reinterpret_cast<void*>(address), store.bytes);
    unsettled.push_back(store);
    state.unsettled = true;
    state.budget = 0;  // the thread comes back at its next basic block
}

// The stores have happened.
static __attribute__((noinline)) void settle() {
    state.unsettled = false;
    for (const Unsettled& store : unsettled)
        if (memcmp(store.before, reinterpret_cast<void*>(store.address), store.bytes) != 0)
            findings[store.finding].same_value = 0;
    unsettled.clear();
    if (!state.launch->listing) fail_with(findings[0]);
}

// A load of a shared word that nobody has stored to. Who stores to it before the next barrier races
// with the load, and that is what is told then.
static __attribute__((noinline)) void suspect_unwritten(const Access& access, const Shadow& word,
                                                        uint64_t address) {
    uint64_t key = 1ull << 60 | access.site;
    if (unwritten.size() >= MAX_FINDINGS || finding_of.count(key)) return;
    Failure finding = {};
    finding.kind = UNWRITTEN;
    set_place(finding, access);
    finding.address = address;
    unwritten.push_back({finding, key, &word, word.known_time, access.write});
}

// All threads of the block have met, or ended, or (with `thread`) this one went wrong.
static void confirm_suspects(int thread = -1) {
    for (const Guess& guess : guesses) {
        if (thread >= 0 && guess.race.thread != thread) continue;
        bool is_new;
        if (state.launch->listing) {
            add_finding(guess.race, guess.key, is_new);
        } else {
            *state.failure = guess.race;
            if (thread >= 0) return;
            fail(RACE);
        }
    }
    guesses.clear();
    for (const Unwritten& load : unwritten) {
        if (!load.certain && load.word->known_time != load.known_time) continue;
        if (thread >= 0 && load.finding.thread != thread) continue;
        bool is_new;
        if (state.launch->listing) {
            add_finding(load.finding, load.key, is_new);
        } else {
            *state.failure = load.finding;
            if (thread >= 0) return;
            fail(UNWRITTEN);
        }
    }
    unwritten.clear();
}

// Kept in the first place while what is there says less; else in the second.
static void remember(const Access& access, Shadow& word, uint8_t mask) {
    uint16_t me = static_cast<uint16_t>(state.current_index | access.strength |
                                        (access.write ? STORED : 0));
    bool mine = is_mine(word.read_time, word.reader);
    bool alike = (word.reader & ~THREAD) == (me & ~THREAD);
    bool over = mine || (word.read_time >= state.block_start &&
                         is_ordered(word.read_time, word.reader & THREAD));
    bool settled = access.shared && word.read_time < state.barrier_time;
    if (word.read_mask == 0 || settled || (alike && over)) {
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

static void check_word(const Access& access, Shadow& word, uint8_t mask, uint64_t address) {
    if ((word.write_mask & mask) && is_race(access, word, word.write_time, word.writer))
        find_race(access, address, word.write_time, word.writer, word.write_site, true);
    if ((word.read_mask & mask) && (access.write || (word.reader & STORED)) &&
        is_race(access, word, word.read_time, word.reader))
        find_race(access, address, word.read_time, word.reader, word.read_site,
                  word.reader & STORED);
    if ((word.other_mask & mask) && (access.write || (word.other_reader & STORED)) &&
        is_race(access, word, word.other_time, word.other_reader))
        find_race(access, address, word.other_time, word.other_reader, word.other_site,
                  word.other_reader & STORED);
    uint8_t known = word.known_time >= state.block_start ? word.known_mask : 0;
    if (access.shared && access.reads && (known & mask) != mask)
        suspect_unwritten(access, word, address);
    if (access.write) {
        word.known_mask = known | mask;
        word.known_time = state.time;
    }
    if (!access.write || access.strength) return remember(access, word, mask);
    uint16_t me = static_cast<uint16_t>(state.current_index);
    bool again = word.write_time >= state.barrier_time && word.writer == me;
    word.write_mask = again ? word.write_mask | mask : mask;
    word.write_time = state.time;
    word.writer = me;
    word.write_site = access.site;
    // What races with an access before this one races with this one too.
    word.read_mask &= ~mask;
    word.other_mask &= ~mask;
}

// Most often a word that nobody has written since the barrier, and that this warp reads again.
static inline bool is_known_read(const Shadow& word, uint8_t mask) {
    if (word.write_time >= state.barrier_time && word.writer != state.current_index) return false;
    if (word.read_time != state.time || (word.read_mask & mask) != mask) return false;
    return word.reader == state.current_index ||
           (word.other_time == state.time && word.other_reader / LANES == state.warp &&
            (word.other_mask & mask) == mask && !learned);
}

static inline Shadow& shadow_of(const Site& site, uint64_t address) {
    return site.shadow[(address >> site.shift) - (site.base >> site.shift)];
}

static inline uint8_t bytes_of_word(const Site& site, uint64_t address, int bytes) {
    if (bytes >= 4 || site.shift == 0) return 15;
    return static_cast<uint8_t>(((1 << bytes) - 1) << (address & 3));
}

static inline bool is_shared(const Site& site) {
    return site.counts.kind == SHARED_LOAD || site.counts.kind == SHARED_STORE ||
           site.counts.kind == SHARED_ATOMIC;
}

static __attribute__((noinline)) void check_words(const Site& site, uint64_t address, int bytes,
                                                  bool write, uint16_t strength, bool reads,
                                                  uint64_t pc) {
    uint16_t index = static_cast<uint16_t>(&site - state.sites);
    Access access = {site.counts.region + 1, address, bytes, write, is_shared(site), strength,
                     reads, pc, index};
    uint8_t mask = bytes_of_word(site, address, bytes);
    for (int i = 0; i < bytes; i += 1 << site.shift)
        check_word(access, shadow_of(site, address + i), mask, address + i);
}

// Next often: nobody has stored to it since the barrier, and another warp reads it too.
static __attribute__((noinline)) void check_load(const Site& site, Shadow& word, uint8_t mask,
                                                 uint64_t address, int bytes, uint64_t pc) {
    bool shared = is_shared(site);
    uint32_t since = shared ? 0 : state.block_start;
    uint16_t me = static_cast<uint16_t>(state.current_index);
    bool quiet = word.write_time < state.barrier_time &&
                 (word.write_time >= since || word.write_time == 0);
    bool loads = !((word.reader | word.other_reader) & STORED);
    bool known = !shared || (word.known_time >= state.block_start && (word.known_mask & mask) == mask);
    if (!quiet || !loads || !known) return check_words(site, address, bytes, false, 0, true, pc);
    bool first = word.read_mask == 0 || (word.read_time < state.barrier_time
                                             ? word.read_time >= since
                                             : word.reader == me);
    uint32_t& time = first ? word.read_time : word.other_time;
    uint16_t& reader = first ? word.reader : word.other_reader;
    uint8_t& bytes_read = first ? word.read_mask : word.other_mask;
    bytes_read = time >= state.barrier_time && reader == me ? bytes_read | mask : mask;
    time = state.time;
    reader = me;
    (first ? word.read_site : word.other_site) = static_cast<uint16_t>(&site - state.sites);
}

static inline void check_race(const Site& site, uint64_t address, int bytes, bool write,
                              uint16_t strength, bool reads, uint64_t pc) {
    if (site.shadow == nullptr) return;
    if (!write && !strength && bytes <= 4 && site.shift == 2) {
        uint8_t mask = bytes == 4 ? 15 : bytes_of_word(site, address, bytes);
        Shadow& word = site.shadow[address / 4 - site.base / 4];
        if (!is_known_read(word, mask)) check_load(site, word, mask, address, bytes, pc);
        return;
    }
    check_words(site, address, bytes, write, strength, reads, pc);
}
