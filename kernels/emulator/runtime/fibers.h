// Threads of a block as fibers: each has a stack, and gives up the processor only when it waits.
#pragma once

#include <sys/mman.h>

#include "state.h"

constexpr size_t STACK_BYTES = 256 * 1024;  // reserved; memory is only used for what is touched
constexpr size_t GUARD_BYTES = 4096;

static char* stacks;
static size_t stacks_bytes;
static int free_stacks[MAX_THREADS];
static int num_free_stacks;

extern "C" void emulator_switch(void** save, void* load);
// Saves what a called function must preserve, changes stacks, and returns on the other one.
asm(R"(
    .text
    .type emulator_switch, @function
    .hidden emulator_switch
    .globl emulator_switch
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

// Stacks are there during a launch only: with their guards, they take two of the process's memory
// mappings each, whose number is limited.
static bool reserve_stacks() {
    size_t bytes = static_cast<size_t>(state.num_threads) * STACK_BYTES;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return false;
    stacks = static_cast<char*>(memory);
    stacks_bytes = bytes;
    // The one used last is taken first: threads that never wait share one stack.
    num_free_stacks = state.num_threads;
    for (int i = 0; i < num_free_stacks; i++) {
        mprotect(stacks + i * STACK_BYTES, GUARD_BYTES, PROT_NONE);
        free_stacks[i] = num_free_stacks - 1 - i;
    }
    return true;
}

static void release_stacks() {
    if (stacks != nullptr) munmap(stacks, stacks_bytes);
    stacks = nullptr;
}

static void back_to_scheduler() { emulator_switch(&state.current->stack_pointer, state.scheduler); }

static void record_exit();
static void settle();

static void thread_main() {
    state.launch->call(state.launch->arguments);
    record_exit();
    state.current->status = DONE;
    back_to_scheduler();
    __builtin_unreachable();
}

static void give_stack(Thread& thread) {
    thread.stack = free_stacks[--num_free_stacks];
    // Not all at the same distance from a power of two: they would share a few places in the cache.
    size_t shift = static_cast<size_t>(thread.stack % 64) * 320;
    uint64_t* top = reinterpret_cast<uint64_t*>(stacks + (thread.stack + 1) * STACK_BYTES - shift);
    top[-1] = 0;
    top[-2] = reinterpret_cast<uint64_t>(&thread_main);
    for (int i = 3; i <= 8; i++) top[-i] = 0;  // the six registers
    thread.stack_pointer = top - 8;
}

static void resume(int index) {
    Thread& thread = state.threads[index];
    if (thread.stack < 0) give_stack(thread);
    threadIdx = {thread.x, thread.y, thread.z};
    state.current = &thread;
    state.current_index = index;
    state.lane = index % LANES;
    state.budget = SLICE;
    emulator_switch(&state.scheduler, thread.stack_pointer);
    state.current = nullptr;
    if (__builtin_expect(state.unsettled, 0)) settle();
    if (thread.status == DONE) free_stacks[num_free_stacks++] = thread.stack;
}

static bool on_stack(uint64_t address) {
    uint64_t base = reinterpret_cast<uint64_t>(stacks);
    return address - base < stacks_bytes;
}
