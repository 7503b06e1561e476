#include "scratch.h"

#include <cstdlib>

#include "errors.h"
#include "sanitize.h"

namespace plx {
namespace {

constexpr i64 PAGE = 4096;

struct Scratch {
    void* data = nullptr;
    i64 size = 0;
    ~Scratch() {
        set_accessible(data, size, size);
        std::free(data);
    }
};
thread_local Scratch scratches[SCRATCH_SLOTS];

}  // namespace

void* scratch_bytes(ScratchSlot slot, i64 size) {
    Scratch& buffer = scratches[slot];
    if (buffer.size < size) {
        set_accessible(buffer.data, buffer.size, buffer.size);
        std::free(buffer.data);
        buffer.size = 0;
        const i64 rounded = (size + PAGE - 1) / PAGE * PAGE;
        buffer.data = std::aligned_alloc(PAGE, size_t(rounded));
        if (buffer.data == nullptr) throw OutOfMemory(size);
        buffer.size = rounded;
    }
    set_accessible(buffer.data, size, buffer.size);
    return buffer.data;
}

}  // namespace plx
