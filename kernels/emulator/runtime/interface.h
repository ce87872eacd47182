// What Python and the runtime exchange; kernels/emulator/binding.py declares the same structures.
#pragma once

#include <cstdint>

extern "C" {

// A guard says whether an array of float4 was initialised, which needs no initialising: not counted.
enum Place : int32_t { GLOBAL, SHARED, GUARD };

// A piece of memory that the kernel may touch: a tensor, a shared array.
struct Region {
    uint64_t base;
    uint64_t bytes;
    int32_t shared;    // Place
    int32_t writable;  // 0: nobody writes it in this launch, so no race is possible
    int32_t element_bytes;
};

struct Launch {
    void (*call)(void** arguments);  // calls the kernel for the current thread
    void** arguments;
    uint32_t grid[3];
    uint32_t block[3];
    const Region* regions;
    int32_t num_regions;
    int32_t counting;  // 0: the kernel was compiled without the hooks
    int32_t interruptible;  // 1: Ctrl-C ends the launch
    int32_t listing;   // 1: races are listed, and the kernel goes on
    double timeout_s;
    uint64_t code_begin, code_end;  // the kernel's own code: where it may be left at any time
};

enum FailureKind : int32_t {
    NO_FAILURE, OUT_OF_BOUNDS, MISALIGNED, RACE, BARRIER, INDEX, TRAP, SIGNAL, TIMEOUT, INTERRUPTED,
    NO_MEMORY, UNWRITTEN, LANE, MASK, SPIN
};

// How far apart the threads of a race are.
enum Scope : int32_t { BLOCKS, WARPS, WITHIN_WARP };
// Why a lane has no value to give.
enum Missing : int32_t { NOT_IN_MASK, ENDED, NO_THREAD };

struct Failure {
    int32_t kind;
    int32_t region;             // index of the region that was accessed, or next to it; -1: none
    uint64_t pc, other_pc;      // where; for a race also where the other thread accessed
    int32_t line, other_line;   // for a barrier, a vote, a trap: the line, since it has no access
    int32_t thread, other_thread;  // flat index within the block; -1: none
    uint32_t block[3];
    uint64_t address;
    // Bytes of the access; the index that was out of bounds; the signal; the lane or mask; of a spin,
    // how many blocks are still to run.
    int64_t detail;
    int32_t write, other_write;  // of a warp operation: which; of a lane: which Missing
    uint32_t other_block[3];
    int32_t scope;       // of a race
    int32_t same_value;  // 1: both threads of a race write the same
    const char* text;           // of a trap, or the file of an index
};

// What one instruction did to one region, all threads together.
struct Counts {
    uint64_t pc;
    int32_t kind;   // Kind
    int32_t bytes;  // of one access
    int32_t region; // index of the region it accessed; -1: none
    uint32_t conflict_degree;
    uint64_t accesses, requests, sectors, wavefronts, ideal_wavefronts, inactive_lanes, divergent;
};

enum Kind : int32_t {
    GLOBAL_LOAD, GLOBAL_STORE, SHARED_LOAD, SHARED_STORE, GLOBAL_ATOMIC, SHARED_ATOMIC, STEP
};
}
