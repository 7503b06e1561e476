// Memory for the outputs of native ops, kept and given out again.
//
// glibc returns large freed blocks to the kernel, or cannot use them again because of their alignment, and every new
// page costs a fault. Here a freed block goes to a list and serves the next tensor of about its size. Tensors get
// their block as a DLPack capsule, whose deleter brings it back.
#include "common.h"

#include <sys/mman.h>

#include <mutex>
#include <vector>

namespace {

// DLPack's ABI before version 1 (https://dmlc.github.io/dlpack), written down from its specification.
struct DLTensor {
    void* data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
};
struct DLManagedTensor {
    DLTensor tensor;
    void* context;
    void (*deleter)(DLManagedTensor*);
};

constexpr i64 HUGE_PAGE = i64(1) << 21;
constexpr int MAX_DIMS = 8;

struct Block {
    char* data;
    i64 size;
};

struct Handle : DLManagedTensor {
    int64_t dims[2 * MAX_DIMS];
    Block block;
};

std::mutex mutex;
std::vector<Block> free_blocks;  // the longest unused first
i64 held = 0, used = 0, most_used = 0;

// Sizes come in steps of an eighth of a power of two, so that tensors of similar size can share blocks.
i64 rounded(i64 size) {
    i64 step = 1 << 16;
    while (step * 16 < size) step *= 2;
    return (size + step - 1) / step * step;
}

void unmap_oldest() {
    munmap(free_blocks.front().data, free_blocks.front().size);
    held -= free_blocks.front().size;
    free_blocks.erase(free_blocks.begin());
}

Block mapped(i64 size) {
    // Never much more than what was in use at once: blocks of sizes that are not asked for any more go.
    while (!free_blocks.empty() && held + size > most_used + most_used / 16) unmap_oldest();
    i64 span = size + HUGE_PAGE;  // room to begin on a huge page
    char* start = static_cast<char*>(mmap(nullptr, span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (start == MAP_FAILED) return {nullptr, 0};
    i64 lead = (HUGE_PAGE - reinterpret_cast<i64>(start) % HUGE_PAGE) % HUGE_PAGE;
    if (lead > 0) munmap(start, lead);
    munmap(start + lead + size, span - lead - size);
    madvise(start + lead, size, MADV_HUGEPAGE);  // advice: where there are none, small pages do
    held += size;
    return {start + lead, size};
}

Block take(i64 size) {
    std::lock_guard<std::mutex> lock(mutex);
    used += size;
    most_used = used > most_used ? used : most_used;
    size_t best = free_blocks.size();
    for (size_t i = free_blocks.size(); i-- > 0;) {  // the newest first: it may still be in the cache
        i64 spare = free_blocks[i].size - size;
        if (spare < 0 || spare > size / 4) continue;
        if (best == free_blocks.size() || free_blocks[i].size < free_blocks[best].size) best = i;
        if (spare == 0) break;
    }
    if (best == free_blocks.size()) {
        Block block = mapped(size);
        if (block.data == nullptr) used -= size;
        return block;
    }
    Block block = free_blocks[best];
    free_blocks.erase(free_blocks.begin() + best);
    used += block.size - size;
    return block;
}

void give_back(DLManagedTensor* managed) {
    Handle* handle = static_cast<Handle*>(managed);
    {
        std::lock_guard<std::mutex> lock(mutex);
        used -= handle->block.size;
        free_blocks.push_back(handle->block);
    }
    delete handle;
}

}  // namespace

// A DLManagedTensor of that shape with unset values, or null where there is no memory. `code` and `bits` as in DLPack.
EXPORT void* buffers_new(int32_t code, int32_t bits, int32_t ndim, const i64* shape) {
    if (ndim > MAX_DIMS) return nullptr;
    i64 count = 1;
    for (int i = 0; i < ndim; ++i) count *= shape[i];
    Block block = take(rounded(count * bits / 8));
    if (block.data == nullptr) return nullptr;
    Handle* handle = new Handle;
    handle->block = block;
    i64 stride = 1;
    for (int i = ndim - 1; i >= 0; --i) {
        handle->dims[i] = shape[i];
        handle->dims[MAX_DIMS + i] = stride;
        stride *= shape[i];
    }
    handle->tensor = {block.data, 1, 0, ndim, uint8_t(code), uint8_t(bits), 1, handle->dims, handle->dims + MAX_DIMS, 0};
    handle->context = handle;  // unused, but Paddle calls the deleter only where it is set
    handle->deleter = give_back;
    return static_cast<DLManagedTensor*>(handle);
}

// Bytes mapped, in use, and most in use at once.
EXPORT void buffers_account(i64* numbers) {
    std::lock_guard<std::mutex> lock(mutex);
    numbers[0] = held;
    numbers[1] = used;
    numbers[2] = most_used;
}

// Returns all unused blocks to the kernel.
EXPORT void buffers_release() {
    std::lock_guard<std::mutex> lock(mutex);
    while (!free_blocks.empty()) unmap_oldest();
    most_used = used;
}
