// A kernel must not end the process: crashes, endless loops and Ctrl-C during a launch come back as failures.
#pragma once

#include <ctime>
#include <sys/syscall.h>
#include <unistd.h>

#include "state.h"

static const int CRASHES[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
static struct sigaction old_crash[4], old_interrupt;
static stack_t old_stack;
static char signal_stack[64 * 1024];
static const int TICK_SIGNAL = SIGRTMAX - 1;
static struct sigaction old_tick;
static timer_t timer;
static bool has_timer;

static void restore_signals();

static double now_s() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

static void on_crash(int number, siginfo_t* info, void* context) {
    if (!pthread_equal(pthread_self(), state.owner) || state.current == nullptr) {
        restore_signals();  // not the kernel's: let it happen again, as it would have
        return;
    }
    auto* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    state.failure->pc = static_cast<uint64_t>(registers[REG_RIP]) + 1;  // as a return address
    state.failure->address = reinterpret_cast<uint64_t>(info->si_addr);
    state.failure->detail = number;
    fail(SIGNAL);
}

static void on_interrupt(int) { state.interrupted = 1; }

static bool is_late() { return now_s() > state.deadline_s; }

// Leaves the kernel where it is, if that can be done: not in the middle of the runtime or of the C
// library, whose data would be left half changed. Then the next tick tries again.
static void on_tick(int, siginfo_t*, void* context) {
    uint64_t pc = static_cast<uint64_t>(
        static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
    if (state.current == nullptr || pc < state.launch->code_begin || pc >= state.launch->code_end)
        return;
    if (!state.interrupted && !is_late()) return;
    state.failure->pc = pc + 1;
    fail(state.interrupted ? INTERRUPTED : TIMEOUT);
}

// A signal to this thread every 50 ms, while the kernel runs.
static void start_ticks() {
    struct sigaction action = {};
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    action.sa_sigaction = on_tick;
    sigaction(TICK_SIGNAL, &action, &old_tick);
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = TICK_SIGNAL;
    event._sigev_un._tid = static_cast<pid_t>(syscall(SYS_gettid));
    has_timer = timer_create(CLOCK_MONOTONIC, &event, &timer) == 0;
    itimerspec period = {{0, 50'000'000}, {0, 50'000'000}};
    if (has_timer) timer_settime(timer, 0, &period, nullptr);
}

static void stop_ticks() {
    if (has_timer) timer_delete(timer);
    has_timer = false;
    // One that is on its way must not find the default action, which ends the process.
    struct sigaction ignore = {};
    ignore.sa_handler = SIG_IGN;
    sigaction(TICK_SIGNAL, old_tick.sa_handler == SIG_DFL ? &ignore : &old_tick, nullptr);
}

static void take_signals() {
    stack_t stack = {signal_stack, 0, sizeof signal_stack};
    sigaltstack(&stack, &old_stack);
    struct sigaction action = {};
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    action.sa_sigaction = on_crash;
    for (int i = 0; i < 4; i++) sigaction(CRASHES[i], &action, &old_crash[i]);
    start_ticks();
    if (!state.launch->interruptible) return;
    action.sa_flags = SA_ONSTACK;
    action.sa_handler = on_interrupt;
    sigaction(SIGINT, &action, &old_interrupt);
}

static void restore_signals() {
    stop_ticks();
    for (int i = 0; i < 4; i++) sigaction(CRASHES[i], &old_crash[i], nullptr);
    if (state.launch->interruptible) sigaction(SIGINT, &old_interrupt, nullptr);
    sigaltstack(&old_stack, nullptr);
}

// At the end of a turn: Ctrl-C and the time limit, for kernels that come through the hooks.
static void check_clock(int thread) {
    if (!state.interrupted && !is_late()) return;
    state.failure->thread = thread;
    if (thread >= 0 && state.threads[thread].step_site != NO_SITE)
        state.failure->pc = state.sites[state.threads[thread].step_site].counts.pc;
    fail(state.interrupted ? INTERRUPTED : TIMEOUT);
}
