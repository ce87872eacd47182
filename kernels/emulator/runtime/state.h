// The state of the one launch that runs at a time.
#pragma once

#include <csetjmp>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <pthread.h>

#include "interface.h"

constexpr int LANES = 32;
constexpr int MAX_THREADS = 1024;
constexpr int MAX_SITES = 4096;
constexpr int MAX_REGIONS = 64;
constexpr uint16_t NO_SITE = 0;        // sites are numbered from 1
constexpr uint16_t LOCAL_SITE = 0xfffe;  // an access to the thread's own stack
constexpr uint16_t EXIT_SITE = 0xffff;  // "the thread ended": successor of a last basic block
// Basic blocks that a thread may do before the next thread of its warp has its turn.
constexpr int SLICE = 2048;

// What the lanes of a warp did when each came to this instruction for the n-th time.
struct Group {
    uint32_t mask;
    uint32_t word[LANES];  // address / 4
};
struct Step {
    uint32_t mask;
    uint16_t successor;
    uint8_t divergent, carried;
};

// Who accessed a word of memory last: 4 bytes, or 1 where elements are smaller. Times are counts of
// synchronisations, and go on from block to block, so that a time says which block it was in.
struct Shadow {
    uint32_t write_time, read_time, other_time;
    uint32_t known_time;         // when anything was last stored: its bytes are known since then
    uint16_t writer, write_site;  // by a plain store
    // Two accesses that were no plain store: by whom, with the flags of races.h.
    uint16_t reader, read_site, other_reader, other_site;
    uint8_t write_mask, read_mask, other_mask, known_mask;  // of the 4 bytes
};

// An instruction that accesses memory, or the start of a basic block.
struct Site {
    uint64_t base, limit;  // addresses it may access: base to base + limit
    Shadow* shadow;        // of the word at base; nullptr where no race is possible
    int shift;             // a word is 1 << shift bytes
    Counts counts;
    Group* groups;
    Step* steps;
    uint32_t used, capacity;
    uint16_t next;      // the same instruction in another region
    uint32_t count[LANES];
};

// An atomic operation or volatile load that a thread may repeat.
struct Poll {
    uint64_t address, pc, value, hash;
    uint32_t attempts;
    int bytes;
};

enum Status : uint8_t { READY, AT_BARRIER, AT_WARP, DONE };

struct Thread {
    void* stack_pointer;
    int stack;      // which of the stacks; -1: none yet
    uint32_t x, y, z;
    Status status;
    int line;       // of the barrier or the warp operation that it waits at
    int operation;
    unsigned mask;
    uint64_t value; // goes into the warp operation, and comes back out of it
    int source, width;
    uint16_t step_site;   // the basic block it is in
    uint32_t step_index;
    uint32_t seen[LANES];  // it sees what each lane of its warp did before that time
    int32_t seen_copy;     // of `seen`, for orders.h; STALE_COPY: to be made; 0: it is all zeros
    uint32_t fence, device_fence;  // its last ones, numbered from 1
    uint32_t knowledge;    // of what other threads released
    Poll poll;
    uint32_t polls, poll_pass;  // in that pass
    uint32_t spun;         // pass in which it was last seen to spin: spins.h
    bool spun_before;      // and in the one before
};

constexpr int32_t STALE_COPY = -1;

struct Warp {
    uint32_t sync_time;  // of the last operation among all its lanes
};

static struct State {
    const Launch* launch;
    Failure* failure;
    // Entry 0 is no region: it contains no address.
    Region regions[MAX_REGIONS + 1];
    Shadow* shadows[MAX_REGIONS + 1];  // of the word at each base; nullptr where no race is possible
    void* allocations[MAX_REGIONS + 1];
    int shifts[MAX_REGIONS + 1];  // a word is 1 << shift bytes
    int num_regions;
    int num_threads;
    Thread threads[MAX_THREADS];
    Warp warps[MAX_THREADS / LANES];
    Thread* current;     // nullptr while the scheduler runs
    int current_index, lane, warp;
    int budget;          // basic blocks left of the current turn
    uint32_t time, barrier_time, block_start;
    uint32_t pass;       // over all warps of a block
    bool unsettled;      // a store that races has not happened yet: races.h
    void* scheduler;
    sigjmp_buf escape;
    pthread_t owner;
    volatile sig_atomic_t interrupted;
    double deadline_s;
    Site sites[MAX_SITES];
    int num_sites;
    uint16_t* site_of;   // by address within the program text
    uint64_t text_base, text_bytes, load_address;
} state;

extern "C" {
// What the kernel sees of its place (declared const in include/cuda_runtime.h).
struct { uint32_t x, y, z; } threadIdx, blockIdx, blockDim, gridDim;
}

[[noreturn]] static void fail(FailureKind kind) {
    Failure& failure = *state.failure;
    failure.kind = kind;
    failure.block[0] = blockIdx.x;
    failure.block[1] = blockIdx.y;
    failure.block[2] = blockIdx.z;
    if (state.current != nullptr) failure.thread = state.current_index;
    state.current = nullptr;
    siglongjmp(state.escape, 1);
}
