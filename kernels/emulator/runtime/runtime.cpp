// Runs a grid: blocks one after another, the threads of a block in turns, warp by warp.
//
// Linked with the compiled kernel into one library; Python calls emulator_launch. A single
// translation unit, so that the compiler sees through all of the hooks.
#include <cstdio>

#include "atomics.h"
#include "collectives.h"
#include "signals.h"

constexpr int MAX_ROUNDS = 64;  // slices a warp may do in a row before the next warp has its turn

static void run_warp(int warp) {
    int first = warp * LANES, last = std::min(first + LANES, state.num_threads);
    state.warp = warp;
    for (int round = 0; round < MAX_ROUNDS;) {
        bool ready = false;
        for (int i = first; i < last; i++) {
            if (state.threads[i].status != READY || is_spinning(state.threads[i])) continue;
            resume(i);
            ready |= state.threads[i].status == READY;
        }
        if (release_warp(first, last)) continue;
        if (!ready) break;
        slide_warp(first, last);
        check_clock(first);
        round++;
    }
    flush_warp(first, last);
}

static void start_block() {
    const uint32_t* block = state.launch->block;
    for (int i = 0; i < state.num_threads; i++) {
        Thread& thread = state.threads[i];
        thread = {};
        thread.stack = -1;
        uint32_t index = static_cast<uint32_t>(i);
        thread.x = index % block[0];
        thread.y = index / block[0] % block[1];
        thread.z = index / block[0] / block[1];
    }
    state.block_start = state.barrier_time = ++state.time;
    if (state.launch->counting) {
        block_starts.push_back(state.block_start);
        begin_block_s_orders();
    }
    // Shared memory holds anything when a block begins: here numbers that show (NaN, -1).
    for (int i = 1; i < state.num_regions; i++)
        if (state.regions[i].shared)
            memset(reinterpret_cast<void*>(state.regions[i].base), 0xff, state.regions[i].bytes);
}

[[noreturn]] static void fail_barrier(const Thread& waiting, const Thread* other) {
    Failure& failure = *state.failure;
    failure.thread = static_cast<int32_t>(&waiting - state.threads);
    failure.line = waiting.line;
    failure.write = waiting.status == AT_WARP ? waiting.operation : -1;
    if (other != nullptr) {
        failure.other_thread = static_cast<int32_t>(other - state.threads);
        failure.other_line = other->status == DONE ? 0 : other->line;
    }
    fail(BARRIER);
}

// Nobody can go on. All at one barrier: pass it. Otherwise some will never come.
static void pass_barrier() {
    const Thread* waiting = nullptr;
    for (int i = 0; i < state.num_threads; i++) {
        const Thread& thread = state.threads[i];
        if (thread.status == AT_WARP) {
            const Thread* warp = &state.threads[i / LANES * LANES];
            for (int lane = 0; lane < LANES && &warp[lane] < state.threads + state.num_threads; lane++)
                if ((thread.mask >> lane & 1) && warp[lane].status != DONE &&
                    (warp[lane].status != AT_WARP || warp[lane].line != thread.line ||
                     warp[lane].operation != thread.operation || warp[lane].mask != thread.mask))
                    fail_barrier(thread, &warp[lane]);
            fail_barrier(thread, nullptr);
        }
        if (thread.status == AT_BARRIER && waiting == nullptr) waiting = &thread;
    }
    confirm_suspects();
    uint64_t votes = 0;
    for (int i = 0; i < state.num_threads; i++) {
        const Thread& thread = state.threads[i];
        if (thread.status == DONE || thread.line != waiting->line ||
            thread.operation != waiting->operation)
            fail_barrier(*waiting, &thread);
        votes += thread.value;
    }
    uint64_t all = votes == static_cast<uint64_t>(state.num_threads);
    for (int i = 0; i < state.num_threads; i++) {
        Thread& thread = state.threads[i];
        thread.value = thread.operation == AND ? all : thread.operation == OR ? votes != 0 : votes;
        thread.status = READY;
    }
    share_knowledge(0, state.num_threads);
    learned = false;
    state.barrier_time = ++state.time;
}

static void run_block() {
    check_clock(-1);
    start_block();
    for (;;) {
        bool ready = false, waiting = false;
        state.pass++;
        for (int warp = 0; warp * LANES < state.num_threads; warp++) run_warp(warp);
        for (int i = 0; i < state.num_threads; i++) {
            ready |= state.threads[i].status == READY;
            waiting |= state.threads[i].status != DONE;
        }
        if (!waiting) return confirm_suspects();
        check_clock(-1);
        if (ready) check_spins();
        else pass_barrier();
    }
}

// Tensors that overlap share one shadow: a word has one history, whatever it is called.
static bool reserve_shadow(int i) {
    const Region& region = state.regions[i];
    uint64_t begin = region.base, end = region.base + region.bytes;
    int owner = i, shift = 2;
    for (bool grew = true; grew;) {
        grew = false;
        for (int j = 1; j < state.num_regions; j++) {
            const Region& other = state.regions[j];
            if (!other.writable || other.base >= end || begin >= other.base + other.bytes) continue;
            grew |= other.base < begin || other.base + other.bytes > end;
            begin = std::min(begin, other.base);
            end = std::max(end, other.base + other.bytes);
            owner = std::min(owner, j);
            if (other.element_bytes < 4) shift = 0;
        }
    }
    if (owner == i) {
        // calloc gives memory that takes no room until it is touched.
        state.allocations[i] = calloc((end >> shift) - (begin >> shift) + 1, sizeof(Shadow));
        if (state.allocations[i] == nullptr) return false;
    }
    uint64_t words = (region.base >> shift) - (begin >> shift);
    state.shadows[i] = static_cast<Shadow*>(state.allocations[owner]) + words;
    state.shifts[i] = shift;
    return true;
}

static bool prepare(const Launch* launch, Failure* failure) {
    state.launch = launch;
    state.failure = failure;
    *failure = {};
    failure->region = failure->thread = failure->other_thread = -1;
    state.current = nullptr;
    state.time = 0;
    memset(state.warps, 0, sizeof state.warps);
    state.pass = 1;
    clear_orders();
    clear_findings();
    state.interrupted = 0;
    state.owner = pthread_self();
    state.deadline_s = now_s() + launch->timeout_s;
    state.num_threads = static_cast<int>(launch->block[0] * launch->block[1] * launch->block[2]);
    state.num_regions = launch->num_regions + 1;
    if (state.num_regions > MAX_REGIONS || !reserve_stacks() || !reserve_sites()) return false;
    memset(state.regions, 0, sizeof state.regions);
    memcpy(state.regions + 1, launch->regions, launch->num_regions * sizeof(Region));
    for (int i = 1; launch->counting && i < state.num_regions; i++) {
        if (!state.regions[i].writable) continue;
        if (!reserve_shadow(i)) return false;
    }
    clear_counts();
    return true;
}

static void release() {
    for (void*& allocation : state.allocations) {
        free(allocation);
        allocation = nullptr;
    }
    memset(state.shadows, 0, sizeof state.shadows);
    clear_orders();
    release_stacks();
    fflush(stdout);
}

// What went wrong may follow from what was found just before it.
static void name_the_cause() {
    Failure& failure = *state.failure;
    if (failure.kind == INTERRUPTED || failure.kind == NO_MEMORY || failure.kind == RACE) return;
    if (state.unsettled) settle();
    else if (!state.launch->listing && failure.kind != TIMEOUT && failure.thread >= 0)
        confirm_suspects(failure.thread);
}

extern "C" __attribute__((visibility("default"))) int emulator_launch(const Launch* launch,
                                                                      Failure* failure) {
    if (!prepare(launch, failure)) {
        release();
        failure->kind = NO_MEMORY;
        return failure->kind;
    }
    take_signals();
    if (sigsetjmp(state.escape, 1) == 0) {
        blockDim = {launch->block[0], launch->block[1], launch->block[2]};
        gridDim = {launch->grid[0], launch->grid[1], launch->grid[2]};
        for (blockIdx.z = 0; blockIdx.z < gridDim.z; blockIdx.z++)
            for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
                for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) run_block();
    }
    if (failure->kind != NO_FAILURE) name_the_cause();
    restore_signals();
    // Ctrl-C that came when no tick was left to see it.
    if (state.interrupted && failure->kind == NO_FAILURE) failure->kind = INTERRUPTED;
    release();
    return failure->kind;
}

// Where shared memory (for the calling thread) and the library begin.
extern "C" __attribute__((visibility("default"))) void emulator_places(uint64_t* shared,
                                                                       uint64_t* load_address) {
    // Touched so that the memory exists: each thread of the process gets its own on first use.
    static thread_local volatile char anchor;
    anchor = 0;
    void* block = nullptr;
    if (reserve_sites()) dl_iterate_phdr(find_shared, &block);
    *shared = reinterpret_cast<uint64_t>(block);
    *load_address = state.load_address;
}

// Copies what each instruction did; gives how many there are.
extern "C" __attribute__((visibility("default"))) int emulator_counts(Counts* counts, int capacity) {
    for (int i = 1; i <= state.num_sites && i <= capacity; i++) counts[i - 1] = state.sites[i].counts;
    return state.num_sites;
}

// Copies what was found and did not end the launch; gives how much there is.
extern "C" __attribute__((visibility("default"))) int emulator_findings(Failure* copies, int capacity) {
    int number = std::min(capacity, static_cast<int>(findings.size()));
    for (int i = 0; i < number; i++) copies[i] = findings[i];
    return number;
}
