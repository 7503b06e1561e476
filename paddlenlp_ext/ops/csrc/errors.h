// Error handling. The library throws exceptions internally; its entry points return a status and store a message.
#pragma once

#include <atomic>
#include <exception>
#include <new>

#include "api.h"

namespace plx {

class OutOfMemory : public std::bad_alloc {
  public:
    explicit OutOfMemory(i64 bytes) : bytes(bytes) {}
    const char* what() const noexcept override { return "cannot allocate memory"; }
    const i64 bytes;
};

// Stores the message of the current exception for last_error(), and returns the status of the exception.
Status report_exception() noexcept;

// Throws the error of an entry point that another entry point has called.
void require_ok(Status status);

// Runs the body of an entry point and converts exceptions to a status.
template <class Body>
inline Status guarded(Body&& body) noexcept {
    try {
        body();
        return OK;
    } catch (...) {
        return report_exception();
    }
}

// Stores the first exception of a parallel region. OpenMP terminates the process if an exception leaves a thread.
class FirstException {
  public:
    template <class Body>
    void guard(Body&& body) noexcept {
        try {
            body();
        } catch (...) {
            if (!is_set_.exchange(true)) exception_ = std::current_exception();
        }
    }

    bool is_set() const noexcept { return is_set_.load(std::memory_order_acquire); }

    // Rethrows the stored exception. Call it after the parallel region.
    void rethrow() const {
        if (exception_ != nullptr) std::rethrow_exception(exception_);
    }

  private:
    std::atomic<bool> is_set_{false};
    std::exception_ptr exception_;
};

}  // namespace plx
