// Pool of memory blocks for the outputs of ops.
//
// glibc returns large freed blocks to the system, or cannot reuse them because of their alignment. Every page of a new
// block then causes a page fault. The pool keeps freed blocks in a list and reuses them for tensors of similar size.
// Paddle receives a block as a DLPack capsule, whose deleter returns the block to the pool.
#include <sys/mman.h>

#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "errors.h"
#include "pooled_array.h"
#include "sanitize.h"

namespace plx {
namespace {

// DLPack's ABI before version 1 (https://dmlc.github.io/dlpack), from its specification.
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
constexpr i64 MAX_DIMS = 8;

struct Handle : DLManagedTensor {
    int64_t dims[2 * MAX_DIMS];
    PooledBlock block;
};

std::mutex mutex;
std::vector<PooledBlock> free_blocks;  // least recently used first
i64 held = 0, used = 0, most_used = 0;

// Rounds up to a multiple of a power of two, so that tensors of similar size can share blocks. The power of two is at
// most an eighth of the size, or 64 KiB if an eighth of the size is less.
i64 rounded(i64 size) {
    i64 step = 1 << 16;
    while (step * 16 < size) step *= 2;
    return (size + step - 1) / step * step;
}

void unmap(const PooledBlock& block) {
    set_accessible(block.data, block.size, block.size);
    munmap(block.data, block.size);
    held -= block.size;
}

void unmap_oldest() {
    unmap(free_blocks.front());
    free_blocks.erase(free_blocks.begin());
}

PooledBlock map_block(i64 size, i64 peak) {
    // Unmaps the least recently used blocks until the pool is not much larger than the peak use.
    while (!free_blocks.empty() && held + size > peak + peak / 16) unmap_oldest();
    i64 span = size + HUGE_PAGE;  // enough to align the block to a huge page
    char* start = static_cast<char*>(mmap(nullptr, span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (start == MAP_FAILED) throw OutOfMemory(size);
    i64 lead = (HUGE_PAGE - reinterpret_cast<i64>(start) % HUGE_PAGE) % HUGE_PAGE;
    if (lead > 0) munmap(start, lead);
    munmap(start + lead + size, span - lead - size);
    madvise(start + lead, size, MADV_HUGEPAGE);  // only a hint: the kernel may use small pages instead
    held += size;
    return {start + lead, size};
}

}  // namespace

PooledBlock acquire_block(i64 bytes) {
    const i64 size = rounded(bytes);
    std::lock_guard<std::mutex> lock(mutex);
    const i64 peak = used + size > most_used ? used + size : most_used;
    size_t best = free_blocks.size();
    for (size_t i = free_blocks.size(); i-- > 0;) {  // most recently used first: the block may be in the CPU cache
        i64 spare = free_blocks[i].size - size;
        if (spare < 0 || spare > size / 4) continue;
        if (best == free_blocks.size() || free_blocks[i].size < free_blocks[best].size) best = i;
        if (spare == 0) break;
    }
    if (best == free_blocks.size()) {
        const PooledBlock block = map_block(size, peak);
        most_used = peak, used += size;
        set_accessible(block.data, bytes, block.size);
        return block;
    }
    const PooledBlock block = free_blocks[best];
    free_blocks.erase(free_blocks.begin() + best);
    most_used = peak, used += block.size;
    set_accessible(block.data, bytes, block.size);
    return block;
}

void release_block(const PooledBlock& block) noexcept {
    std::lock_guard<std::mutex> lock(mutex);
    used -= block.size;
    try {
        free_blocks.push_back(block);
        set_accessible(block.data, 0, block.size);
    } catch (const std::bad_alloc&) {  // no memory to grow the list
        unmap(block);
    }
}

namespace {

void delete_tensor(DLManagedTensor* managed) {
    std::unique_ptr<Handle> handle(static_cast<Handle*>(managed));
    release_block(handle->block);
}

i64 tensor_bytes(i64 bits, i64 dims, const i64* shape) {
    if (dims > MAX_DIMS)
        throw std::invalid_argument("a tensor has at most " + std::to_string(MAX_DIMS) + " dimensions");
    i64 size = bits;
    for (i64 i = 0; i < dims; ++i)
        if (__builtin_mul_overflow(size, shape[i], &size)) throw std::bad_alloc();
    return size / 8;
}

}  // namespace

Status buffers_new(i64 code, i64 bits, i64 dims, const i64* shape, void** tensor) {
    return guarded([&] {
        const i64 size = tensor_bytes(bits, dims, shape);
        auto handle = std::make_unique<Handle>();
        handle->block = acquire_block(size);
        i64 stride = 1;
        for (i64 i = dims - 1; i >= 0; --i) {
            handle->dims[i] = shape[i];
            handle->dims[MAX_DIMS + i] = stride;
            stride *= shape[i];
        }
        handle->tensor = {handle->block.data,      1, 0, int32_t(dims), uint8_t(code), uint8_t(bits), 1, handle->dims,
                          handle->dims + MAX_DIMS, 0};
        handle->context = handle.get();  // not read, but Paddle calls the deleter only if `context` is set
        handle->deleter = delete_tensor;
        *tensor = static_cast<DLManagedTensor*>(handle.release());
    });
}

Status buffers_account(i64* numbers) {
    std::lock_guard<std::mutex> lock(mutex);
    numbers[0] = held;
    numbers[1] = used;
    numbers[2] = most_used;
    return OK;
}

Status buffers_release() {
    std::lock_guard<std::mutex> lock(mutex);
    while (!free_blocks.empty()) unmap_oldest();
    most_used = used;
    return OK;
}

}  // namespace plx
