// From one fiber's stack to another's. Included by one file of a library: it defines the function.
#pragma once

#if !defined(__x86_64__)
#error "fibers are written for x86-64 only"
#endif

// Leaves this stack, its pointer in *from, for another one.
extern "C" void msl_switch_stack(void** from, void* to);
asm(R"(
.text
.globl msl_switch_stack
.hidden msl_switch_stack
msl_switch_stack:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
)");
