// Stacks for signal handlers during the products of oneDNN.
//
// On AVX2 processors, oneDNN's kernels for products of floats use the stack pointer as a data pointer. The kernel
// pushes the frame of a signal below the stack pointer, and would overwrite tensors and the heap. Handlers that Python
// installs run on the alternate stack of the thread instead, if the thread has one (sigaltstack(2)).
#pragma once

#include "parallel.h"

#ifdef __linux__
#include <signal.h>

#include <memory>
#include <new>
#endif

namespace plx {

// Alternate stack of a thread. If the thread already has one, it is kept.
class SignalStack {
#ifdef __linux__
    static constexpr size_t SIZE = 1 << 16;  // bytes; a frame with AVX-512 and AMX registers takes 11 KB
    std::unique_ptr<char[]> memory_;

    static void set(void* memory, int flags) {
        stack_t stack{};
        stack.ss_sp = memory;
        stack.ss_flags = flags;
        stack.ss_size = SIZE;
        sigaltstack(&stack, nullptr);
    }

  public:
    SignalStack() {
        stack_t present;
        if (sigaltstack(nullptr, &present) != 0 || (present.ss_flags & SS_DISABLE) == 0) return;
        memory_.reset(new (std::nothrow) char[SIZE]);
        if (memory_) set(memory_.get(), 0);
    }
    ~SignalStack() {
        if (memory_) set(nullptr, SS_DISABLE);
    }
#endif
};

// Gives the calling thread, and the other threads of its OpenMP team, an alternate stack. The kernel delivers a signal
// to any of these threads while the main thread handles another signal. OpenMP may replace threads of the team between
// two products, so every product calls this function.
static inline void use_signal_stacks() {
    const auto use_stack = [] { [[maybe_unused]] thread_local SignalStack stack; };
#pragma omp parallel
    use_stack();
}

}  // namespace plx
