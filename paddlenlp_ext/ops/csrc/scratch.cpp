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
    Scratch& kept = scratches[slot];
    if (kept.size < size) {
        set_accessible(kept.data, kept.size, kept.size);
        std::free(kept.data);
        kept.size = 0;
        const i64 rounded = (size + PAGE - 1) / PAGE * PAGE;
        kept.data = std::aligned_alloc(PAGE, size_t(rounded));
        if (kept.data == nullptr) throw OutOfMemory(size);
        kept.size = rounded;
    }
    set_accessible(kept.data, size, kept.size);
    return kept.data;
}

}  // namespace plx
