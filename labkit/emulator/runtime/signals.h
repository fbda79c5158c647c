// Faults that the processor finds (wild pointers, stack overflow, division by zero) and the time limit. One
// handler a process and library copy, on an alternate stack, for the thread that runs a kernel; everything
// else goes to whoever had the signal before.
#pragma once
#include "faults.h"

static const void* fault_pc;
static uintptr_t fault_address, fault_stack_pointer;
static int fault_signal, fault_code;

#ifndef _WIN32
static thread_local sigjmp_buf back_to_launch;
static thread_local volatile sig_atomic_t kernel_runs_here;
static pthread_t kernel_thread;
static const int CAUGHT[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
static struct sigaction previous_action[4];
static struct sigaction previous_alarm;
static bool handlers_installed, timer_handler_installed, timer_started;
static volatile sig_atomic_t kernel_runs;  // in whichever thread
static double time_limit;
#ifdef __linux__
static const bool TIMERS_HIT_THEIR_THREAD = true;
#else
static const bool TIMERS_HIT_THEIR_THREAD = false;
#endif

static const void* interrupted_pc(void* context)
{
#if defined(__linux__) && defined(__x86_64__)
    return (void*)((ucontext_t*)context)->uc_mcontext.gregs[16];  // REG_RIP
#elif defined(__linux__) && defined(__aarch64__)
    return (void*)((ucontext_t*)context)->uc_mcontext.pc;
#else
    (void)context;
    return nullptr;
#endif
}

static uintptr_t interrupted_stack_pointer(void* context)
{
#if defined(__linux__) && defined(__x86_64__)
    return (uintptr_t)((ucontext_t*)context)->uc_mcontext.gregs[15];  // REG_RSP
#elif defined(__linux__) && defined(__aarch64__)
    return (uintptr_t)((ucontext_t*)context)->uc_mcontext.sp;
#else
    (void)context;
    return 0;
#endif
}

// In the gap below a stack, or, with a local array that is bigger than the gap, somewhere below.
static bool stack_overflowed()
{
    const uintptr_t base = (uintptr_t)stacks.base(current->stack), furthest = (uintptr_t)1 << 28;
    const uintptr_t sp = fault_stack_pointer;
    return stacks.in_gap(fault_address) || (sp && sp < base && base - sp < furthest);
}

static void on_fault(int signal, siginfo_t* info, void* context)
{
    if (kernel_runs_here) {
        fault_signal = signal;
        fault_code = info->si_code;
        fault_address = (uintptr_t)info->si_addr;
        fault_pc = interrupted_pc(context);
        fault_stack_pointer = interrupted_stack_pointer(context);
        siglongjmp(back_to_launch, 1);
    }
    for (int i = 0; i < 4; i++) {
        if (CAUGHT[i] != signal) continue;
        const struct sigaction& previous = previous_action[i];
        if (previous.sa_flags & SA_SIGINFO && previous.sa_sigaction)
            previous.sa_sigaction(signal, info, context);
        else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN)
            previous.sa_handler(signal);
        else sigaction(signal, &previous, nullptr);  // the instruction runs again and faults for good
    }
}

// First tick: ask. The next ones: the kernel has not called the runtime for a while, so it is in a loop of
// its own and holds no lock of the C library: leave it where it stands.
static void on_timer(int signal, siginfo_t* info, void* context)
{
    if (!kernel_runs_here) {
        // Another copy's tick, or (where timers are the process's) one that another thread has got.
        if (previous_alarm.sa_flags & SA_SIGINFO && previous_alarm.sa_sigaction)
            previous_alarm.sa_sigaction(signal, info, context);
        if (kernel_runs && !TIMERS_HIT_THEIR_THREAD) pthread_kill(kernel_thread, SIGALRM);
        return;
    }
    if (!time_is_up || counting) {
        time_is_up = 1;
        return;
    }
    fault_signal = SIGALRM;
    fault_pc = interrupted_pc(context);
    siglongjmp(back_to_launch, 1);
}

static void install_handlers()
{
    if (handlers_installed) return;
    handlers_installed = true;
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 4; i++) sigaction(CAUGHT[i], &action, &previous_action[i]);
}

static void install_timer_handler()
{
    if (timer_handler_installed) return;
    timer_handler_installed = true;
    struct sigaction action = {};
    action.sa_sigaction = on_timer;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    sigaction(SIGALRM, &action, &previous_alarm);
}

// The limit, then a tick every tenth of a second.
#ifdef __linux__
// A timer a thread: two copies of a library run at once. (By system calls: older C libraries keep these in
// librt.)
static int thread_timer;

static void start_timer()
{
    if (time_limit <= 0) return;
    install_timer_handler();
    struct sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = SIGALRM;
    event._sigev_un._tid = (pid_t)syscall(SYS_gettid);
    if (syscall(SYS_timer_create, CLOCK_MONOTONIC, &event, &thread_timer)) return;
    timer_started = true;
    struct itimerspec times = {};
    times.it_value.tv_sec = (time_t)time_limit;
    times.it_value.tv_nsec = (long)((time_limit - (double)(time_t)time_limit) * 1e9);
    times.it_interval.tv_nsec = 100000000;
    syscall(SYS_timer_settime, thread_timer, 0, &times, nullptr);
}
static void end_timer()
{
    if (timer_started) syscall(SYS_timer_delete, thread_timer);
    timer_started = false;
}
#else
static void start_timer()
{
    if (time_limit <= 0) return;
    install_timer_handler();
    struct itimerval times = {};
    times.it_value.tv_sec = (time_t)time_limit;
    times.it_value.tv_usec = (suseconds_t)((time_limit - (double)(time_t)time_limit) * 1e6);
    times.it_interval.tv_usec = 100000;
    setitimer(ITIMER_REAL, &times, nullptr);
    timer_started = true;
}
static void end_timer()
{
    struct itimerval off = {};
    if (timer_started) setitimer(ITIMER_REAL, &off, nullptr);
    timer_started = false;
}
#endif

// The signal as one line, after the jump back to the launch.
static void describe_fault()
{
    failed = true;
    emu::text m;
    if (fault_signal == SIGALRM) {
        m += "time limit: the kernel was still running";
    } else if (fault_signal == SIGFPE) {
        m += "integer division by zero: a GPU would go on with a meaningless number";
    } else if (fault_signal == SIGILL) {
        m += "trap: illegal instruction";
    } else if (stack_overflowed()) {
        m.addf("stack overflow: a thread has %zu bytes for its local arrays and calls", stacks.usable);
#ifdef SI_KERNEL
    } else if (fault_signal == SIGSEGV && fault_code == SI_KERNEL) {
        m += "illegal memory access: an address that no memory can have, or one not aligned to its vector's "
             "size";
#endif
    } else {
        m.addf("illegal memory access: address %#llx%s", (unsigned long long)fault_address,
               fault_address < 65536 ? " (null pointer)" : "");
    }
    m += ", ";
    m += where(current);
    m += ", ";
    const bool memory_fault = fault_signal == SIGSEGV || fault_signal == SIGBUS;
    if (tracing && memory_fault && last_traced_pc) m += at_code(last_traced_pc);
    else m += at_code((const char*)fault_pc + 1);  // like a return address: one past
    error_message = m;
}

#else  // Windows: a vectored handler sends the fiber to a function that reports and leaves.
static bool kernel_runs_here, handlers_installed;
static double time_limit;  // on Windows the parent process ends a kernel that runs too long

static void windows_landing()
{
    emu::text m;
    if (stacks.in_gap(fault_address))
        m.addf("stack overflow: a thread has %zu bytes for its local arrays and calls", stacks.usable);
    else if (fault_signal) m += "integer division by zero: a GPU would go on with a meaningless number";
    else
        m.addf("illegal memory access: address %#llx%s", (unsigned long long)fault_address,
               fault_address < 65536 ? " (null pointer)" : "");
    fail_at(m.c_str(), current, (const char*)fault_pc + 1);
}
static LONG CALLBACK on_exception(EXCEPTION_POINTERS* exception)
{
    const DWORD code = exception->ExceptionRecord->ExceptionCode;
    const bool division = code == EXCEPTION_INT_DIVIDE_BY_ZERO;
    if (!kernel_runs_here || (code != EXCEPTION_ACCESS_VIOLATION && !division))
        return EXCEPTION_CONTINUE_SEARCH;
    static char landing_stack[65536];
    fault_signal = division;
    fault_address = division ? 0 : (uintptr_t)exception->ExceptionRecord->ExceptionInformation[1];
    fault_pc = exception->ExceptionRecord->ExceptionAddress;
#ifdef _M_X64
    exception->ContextRecord->Rip = (DWORD64)&windows_landing;
    exception->ContextRecord->Rsp =
        ((DWORD64)(landing_stack + sizeof landing_stack - 256) & ~(DWORD64)15) - 8;
    return EXCEPTION_CONTINUE_EXECUTION;
#else
    (void)landing_stack;
    return EXCEPTION_CONTINUE_SEARCH;
#endif
}
static void install_handlers()
{
    if (!handlers_installed) AddVectoredExceptionHandler(1, on_exception);
    handlers_installed = true;
}
#endif

EMU_EXPORT void cuemu_set_limit(double seconds) { time_limit = seconds; }
EMU_EXPORT void cuemu_stop(void) { stop_requested = 1; }
