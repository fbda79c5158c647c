// CUDA threads are fibers: each has a stack of its own, and a switch saves the callee-saved registers on one
// stack and takes them from another (13 ns; ucontext, which asks the kernel about signals, costs 245 ns).
#pragma once
#include "platform.h"

// Saves this fiber's stack pointer in *save and goes on where `load` was saved.
extern "C" void cuemu_switch(void** save, void* load);

#ifdef __APPLE__
#define EMU_SYMBOL(name) "_" name
#else
#define EMU_SYMBOL(name) name
#endif
#ifdef __ELF__
#define EMU_HIDDEN ".hidden cuemu_switch\n"
#else
#define EMU_HIDDEN ""
#endif
#define EMU_ASM_BEGIN                                                                                        \
    ".text\n.globl " EMU_SYMBOL("cuemu_switch") "\n" EMU_HIDDEN                                              \
                                                ".p2align 4\n" EMU_SYMBOL("cuemu_switch") ":\n"

// prepare_stack lays out a stack as if `entry` had been interrupted by a switch on its first instruction.

#if defined(__x86_64__) && !defined(_WIN32)
// System V: rbx, rbp, r12–r15.
asm(EMU_ASM_BEGIN
    "  pushq %rbp\n"
    "  pushq %rbx\n"
    "  pushq %r12\n"
    "  pushq %r13\n"
    "  pushq %r14\n"
    "  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n"
    "  popq %r14\n"
    "  popq %r13\n"
    "  popq %r12\n"
    "  popq %rbx\n"
    "  popq %rbp\n"
    "  ret\n");

static void* prepare_stack(char* base, size_t size, void (*entry)())
{
    void** top = (void**)(((uintptr_t)base + size) & ~(uintptr_t)63);
    *--top = nullptr;  // entry's return address: rsp % 16 == 8 at its first instruction, as after a call
    *--top = (void*)entry;
    for (int i = 0; i < 6; i++) *--top = nullptr;
    return top;
}

#elif defined(__x86_64__) && defined(_WIN32)
// Win64: rdi, rsi and xmm6–15 too, and the thread block's stack bounds (StackBase, StackLimit,
// DeallocationStack) move with the stack, or Windows would take a switch for a stack overflow.
asm(EMU_ASM_BEGIN
    "  pushq %rbp\n"
    "  pushq %rbx\n"
    "  pushq %rdi\n"
    "  pushq %rsi\n"
    "  pushq %r12\n"
    "  pushq %r13\n"
    "  pushq %r14\n"
    "  pushq %r15\n"
    "  movq %gs:0x08, %rax\n"
    "  pushq %rax\n"
    "  movq %gs:0x10, %rax\n"
    "  pushq %rax\n"
    "  movq %gs:0x1478, %rax\n"
    "  pushq %rax\n"
    "  subq $160, %rsp\n"
    "  movups %xmm6, 0(%rsp)\n"
    "  movups %xmm7, 16(%rsp)\n"
    "  movups %xmm8, 32(%rsp)\n"
    "  movups %xmm9, 48(%rsp)\n"
    "  movups %xmm10, 64(%rsp)\n"
    "  movups %xmm11, 80(%rsp)\n"
    "  movups %xmm12, 96(%rsp)\n"
    "  movups %xmm13, 112(%rsp)\n"
    "  movups %xmm14, 128(%rsp)\n"
    "  movups %xmm15, 144(%rsp)\n"
    "  movq %rsp, (%rcx)\n"
    "  movq %rdx, %rsp\n"
    "  movups 0(%rsp), %xmm6\n"
    "  movups 16(%rsp), %xmm7\n"
    "  movups 32(%rsp), %xmm8\n"
    "  movups 48(%rsp), %xmm9\n"
    "  movups 64(%rsp), %xmm10\n"
    "  movups 80(%rsp), %xmm11\n"
    "  movups 96(%rsp), %xmm12\n"
    "  movups 112(%rsp), %xmm13\n"
    "  movups 128(%rsp), %xmm14\n"
    "  movups 144(%rsp), %xmm15\n"
    "  addq $160, %rsp\n"
    "  popq %rax\n"
    "  movq %rax, %gs:0x1478\n"
    "  popq %rax\n"
    "  movq %rax, %gs:0x10\n"
    "  popq %rax\n"
    "  movq %rax, %gs:0x08\n"
    "  popq %r15\n"
    "  popq %r14\n"
    "  popq %r13\n"
    "  popq %r12\n"
    "  popq %rsi\n"
    "  popq %rdi\n"
    "  popq %rbx\n"
    "  popq %rbp\n"
    "  ret\n");

static void* prepare_stack(char* base, size_t size, void (*entry)())
{
    void** top = (void**)((((uintptr_t)base + size) & ~(uintptr_t)63) - 64);  // 32 bytes of home space above
    *--top = nullptr;
    *--top = (void*)entry;
    for (int i = 0; i < 8; i++) *--top = nullptr;
    *--top = base + size;
    *--top = base;
    *--top = base;
    top -= 160 / sizeof(void*);
    memset(top, 0, 160);
    return top;
}

#elif defined(__aarch64__)
// x19–x30 and d8–d15.
asm(EMU_ASM_BEGIN
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n"
    "  stp x21, x22, [sp, #16]\n"
    "  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n"
    "  stp x27, x28, [sp, #64]\n"
    "  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n"
    "  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n"
    "  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n"
    "  str x9, [x0]\n"
    "  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n"
    "  ldp x21, x22, [sp, #16]\n"
    "  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n"
    "  ldp x27, x28, [sp, #64]\n"
    "  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n"
    "  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n"
    "  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n"
    "  ret\n");

static void* prepare_stack(char* base, size_t size, void (*entry)())
{
    char* top = (char*)(((uintptr_t)base + size) & ~(uintptr_t)63) - 160;
    memset(top, 0, 160);
    ((void**)top)[11] = (void*)entry;  // x30, the return address
    return top;
}
#else
#error "the emulator's fibers know x86-64 and AArch64"
#endif

// A stack for each thread of a block that has to wait. Below each lies a gap that may not be touched: a
// thread that runs out of stack faults there instead of writing into its neighbour. Stacks are opened on
// first use, and given back after a launch that needed many: an operating system allows a process some 65,000
// pieces of memory, and each loaded kernel has its own.
struct Stacks {
    static const size_t gap = 128 * 1024;
    static const int kept = 64;
    size_t usable = 128 * 1024;
    char* start = nullptr;
    int count = 0, opened = 0;

    size_t pitch() const { return usable + gap; }
    size_t bytes() const { return pitch() * (size_t)count; }
    char* base(int i) const { return start + pitch() * (size_t)i + gap; }
    bool contain(uintptr_t address) const { return start && address - (uintptr_t)start < bytes(); }
    bool in_gap(uintptr_t address) const
    {
        return contain(address) && (address - (uintptr_t)start) % pitch() < gap;
    }

    bool reserve(int wanted)
    {
        if (wanted <= count) return true;
        release();
        start = reserve_pages(pitch() * (size_t)wanted);
        count = start ? wanted : 0;
        return start != nullptr && open(0);
    }
    // Stacks are handed out in ascending order.
    bool open(int i)
    {
        while (opened <= i) {
            if (!open_pages(base(opened), usable)) return false;
            opened++;
        }
        return true;
    }
    void release()
    {
        if (start) release_pages(start, bytes());
        start = nullptr;
        count = opened = 0;
    }
    void release_many()
    {
        if (opened > kept) release();
    }
};
static Stacks stacks;
