// Error handling: exceptions inside the library, a status and a message at its boundary.
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

// Stores the message of the exception being handled for last_error() and returns its status.
Status report_exception() noexcept;

// Runs the body of an entry point and turns exceptions into a status.
template <class Body>
inline Status guarded(Body&& body) noexcept {
    try {
        body();
        return OK;
    } catch (...) {
        return report_exception();
    }
}

// Stores the first exception of a parallel region: an exception that leaves a thread's part would end the process.
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

    // To be called after the region.
    void rethrow() const {
        if (exception_ != nullptr) std::rethrow_exception(exception_);
    }

  private:
    std::atomic<bool> is_set_{false};
    std::exception_ptr exception_;
};

}  // namespace plx
