#include "errors.h"

#include <cstdio>
#include <stdexcept>

namespace plx {
namespace {

struct ReportedError {  // its message is already stored
    Status status;
};

thread_local char message[256];  // a fixed size: reporting a lack of memory must not allocate

Status report(Status status, const char* text) noexcept {
    std::snprintf(message, sizeof message, "%s", text);
    return status;
}

}  // namespace

Status report_exception() noexcept {
    try {
        throw;
    } catch (const ReportedError& error) {
        return error.status;
    } catch (const OutOfMemory& error) {
        std::snprintf(message, sizeof message, "cannot allocate %lld bytes", static_cast<long long>(error.bytes));
        return MEMORY_ERROR;
    } catch (const std::bad_alloc&) {
        return report(MEMORY_ERROR, "out of memory");
    } catch (const std::length_error&) {  // a std::vector above its maximum size
        return report(MEMORY_ERROR, "out of memory");
    } catch (const std::invalid_argument& error) {
        return report(VALUE_ERROR, error.what());
    } catch (const std::exception& error) {
        return report(RUNTIME_ERROR, error.what());
    } catch (...) {
        return report(RUNTIME_ERROR, "unknown C++ exception");
    }
}

void require_ok(Status status) {
    if (status != OK) throw ReportedError{status};
}

const char* last_error() { return message; }

}  // namespace plx
