// A thread that waits in a loop for memory to change, which nobody is going to change.
//
// Blocks run one after another, so a barrier of the whole grid made of atomics waits forever. A thread
// *spins* when it comes back to an atomic operation or a volatile load with the same value there, the
// same registers and the same stack: then it can only do the same again. It gives up its turn. When
// all threads of a block that do not wait at a barrier have spun twice, each between two turns of all
// others, nothing can change any more. A loop that counts its attempts does not spin.
#pragma once

#include "fibers.h"

constexpr uint32_t POLLS = 16;      // that a thread may do in a pass before it is looked at
constexpr uint32_t ATTEMPTS = 64;   // states compared in a pass

// `registers`: where the stub below has pushed them; all that is above is the thread's state.
extern "C" void emulator_look_at_poll(uint64_t address, int bytes, uint64_t pc, uint64_t* registers);
extern "C" void emulator_poll(uint64_t address, int bytes, uint64_t pc);
asm(R"(
    .text
    .type emulator_poll, @function
    .hidden emulator_poll
    .globl emulator_poll
emulator_poll:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, %rcx
    subq $8, %rsp
    call emulator_look_at_poll
    addq $8, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

static uint64_t hash_of(const uint64_t* begin, const uint64_t* end) {
    uint64_t hash = 14695981039346656037ull;
    for (const uint64_t* word = begin; word < end; word++) hash = (hash ^ *word) * 1099511628211ull;
    return hash;
}

static uint64_t value_at(uint64_t address, int bytes) {
    uint64_t value = 0;
    memcpy(&value, reinterpret_cast<void*>(address), static_cast<size_t>(bytes));
    return value;
}

extern "C" __attribute__((used, visibility("hidden"))) void emulator_look_at_poll(
    uint64_t address, int bytes, uint64_t pc, uint64_t* registers) {
    Thread& thread = *state.current;
    if (on_stack(address)) return;
    Poll& poll = thread.poll;
    if (thread.polls == POLLS) {
        poll = {address, pc, 0, 0, 0, bytes};
        return;
    }
    if (poll.address != address || poll.pc != pc || poll.attempts >= ATTEMPTS) return;
    const char* top = stacks + (thread.stack + 1) * STACK_BYTES;
    uint64_t value = value_at(address, bytes);
    uint64_t hash = hash_of(registers, reinterpret_cast<const uint64_t*>(top));
    if (poll.attempts++ == 0 || poll.value != value || poll.hash != hash) {
        if (poll.attempts == 1) poll.value = value, poll.hash = hash;
        return;
    }
    thread.spun_before = thread.spun == state.pass - 1;
    thread.spun = state.pass;
    back_to_scheduler();
    thread.polls = POLLS;
    thread.poll_pass = state.pass;
    poll.attempts = 1;
    poll.value = value_at(address, bytes);
}

// An atomic operation or a volatile load is about to happen.
static inline void watch_poll(uint64_t address, int bytes, uint64_t pc) {
    Thread& thread = *state.current;
    if (thread.poll_pass != state.pass) {
        thread.poll_pass = state.pass;
        thread.polls = 0;
    }
    if (++thread.polls >= POLLS) emulator_poll(address, bytes, pc);
}

static bool is_spinning(const Thread& thread) { return thread.spun == state.pass; }

[[noreturn]] static void fail_spin(int index) {
    const Poll& poll = state.threads[index].poll;
    Failure& failure = *state.failure;
    failure.thread = index;
    failure.pc = poll.pc;
    failure.address = poll.address;
    for (int i = 1; i < state.num_regions; i++)
        if (poll.address - state.regions[i].base < state.regions[i].bytes) failure.region = i - 1;
    uint64_t block = (static_cast<uint64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x;
    failure.detail = static_cast<int64_t>(static_cast<uint64_t>(gridDim.x) * gridDim.y * gridDim.z -
                                          block - blockIdx.x - 1);
    fail(SPIN);
}

// After a pass in which nobody reached a barrier.
static void check_spins() {
    int spinning = -1;
    for (int i = 0; i < state.num_threads; i++) {
        if (state.threads[i].status != READY) continue;
        if (!is_spinning(state.threads[i]) || !state.threads[i].spun_before) return;
        if (spinning < 0) spinning = i;
    }
    if (spinning >= 0) fail_spin(spinning);
}
