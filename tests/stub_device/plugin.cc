// Plug-in of Paddle for a device type "stub": two devices without kernels, so
// that Paddle computes on the CPU.
//
// Each device has memory of its own, mapped twice. Tensors have addresses in a
// mapping that cannot be accessed, and the functions of this plug-in copy
// through the other one. Paddle's CPU kernels write the outputs of in-place ops
// through the address of the tensor, so a fault in Paddle opens its page until
// the next call of this plug-in. A fault with a frame of the C++ library of
// paddlenlp_ext, or of NumPy, on the stack ends the process.
//
// STUB_DEVICE_BYTES limits the memory of a device. If STUB_DEVICE_LACKS_DRIVER
// is set, the plug-in does not start.
#include "plugin.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <mutex>

namespace {

constexpr size_t kDevices = 2, kSpan = size_t{1} << 38, kPage = 4096;

struct Memory {
    char *tensors = nullptr, *copies = nullptr;
    size_t next = 0, used = 0;
};

Memory memories[kDevices];
std::mutex lock;
thread_local int current = 0;
char* opened[1 << 16];
size_t num_opened = 0;
struct sigaction previous;

size_t limit() {
    const char* bytes = std::getenv("STUB_DEVICE_BYTES");
    return bytes ? std::strtoull(bytes, nullptr, 10) : size_t{8} << 30;
}

size_t pages(size_t size) { return (size + kPage - 1) / kPage * kPage; }

Memory* owner(const void* address) {
    for (auto& memory : memories)
        if (memory.tensors && address >= memory.tensors && address < memory.tensors + kSpan) return &memory;
    return nullptr;
}

}  // namespace

char* real(const void* address) {
    auto* memory = owner(address);
    if (!memory) {
        std::fprintf(stderr, "stub device: %p is not in its memory\n", address);
        std::abort();
    }
    return memory->copies + (static_cast<const char*>(address) - memory->tensors);
}

void close_pages() {
    std::lock_guard<std::mutex> guard(lock);
    for (; num_opened > 0; --num_opened) mprotect(opened[num_opened - 1], kPage, PROT_NONE);
}

namespace {

bool is_foreign(void* frame) {
    Dl_info info;
    if (!dladdr(frame, &info) || !info.dli_fname) return false;
    return std::strstr(info.dli_fname, "paddlenlp_ext") || std::strstr(info.dli_fname, "numpy");
}

void on_fault(int number, siginfo_t* info, void*) {
    void* frames[64];
    const int count = backtrace(frames, 64);
    bool is_refused = !owner(info->si_addr) || num_opened == std::size(opened);
    for (int frame = 0; frame < count; ++frame) is_refused |= is_foreign(frames[frame]);
    if (is_refused) {
        if (owner(info->si_addr)) std::fprintf(stderr, "stub device: host code accessed the memory of a device\n");
        sigaction(number, &previous,
                  nullptr);  // the access is repeated, and ends the process
        return;
    }
    char* page = reinterpret_cast<char*>(reinterpret_cast<size_t>(info->si_addr) / kPage * kPage);
    opened[__atomic_fetch_add(&num_opened, 1, __ATOMIC_RELAXED)] = page;
    mprotect(page, kPage, PROT_READ | PROT_WRITE);
}

C_Status initialize() { return std::getenv("STUB_DEVICE_LACKS_DRIVER") ? C_FAILED : C_SUCCESS; }
C_Status finalize() { return C_SUCCESS; }

C_Status init_device(const C_Device device) {
    std::lock_guard<std::mutex> guard(lock);
    auto& memory = memories[device->id];
    if (memory.tensors) return C_SUCCESS;
    const int file = memfd_create("stub device", 0);
    if (file < 0 || ftruncate(file, kSpan)) return C_FAILED;
    void* tensors = mmap(nullptr, kSpan, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    void* copies = mmap(nullptr, kSpan, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    if (tensors == MAP_FAILED || copies == MAP_FAILED) return C_FAILED;
    memory.tensors = static_cast<char*>(tensors), memory.copies = static_cast<char*>(copies);
    struct sigaction action = {};
    void* frames[1];
    backtrace(frames,
              1);  // loads the unwinder, which a signal handler must not do
    action.sa_sigaction = on_fault, action.sa_flags = SA_SIGINFO | SA_NODEFER;
    struct sigaction replaced;
    sigaction(SIGSEGV, &action, &replaced);
    if (replaced.sa_sigaction != on_fault) previous = replaced;
    return C_SUCCESS;
}

C_Status on_device(const C_Device) { return C_SUCCESS; }
C_Status set_device(const C_Device device) { return current = device->id, C_SUCCESS; }
C_Status get_device(const C_Device device) { return device->id = current, C_SUCCESS; }

template <typename T>
C_Status create(const C_Device, T* handle) {
    return *handle = static_cast<T>(std::malloc(1)), C_SUCCESS;
}

template <typename T>
C_Status destroy(const C_Device, T handle) {
    return std::free(handle), C_SUCCESS;
}

template <typename... T>
C_Status done(const C_Device, T...) {
    return C_SUCCESS;
}

C_Status call_back(const C_Device device, C_Stream stream, C_Callback callback, void* data) {
    C_Status status = C_SUCCESS;
    callback(device, stream, data, &status);
    return status;
}

C_Status allocate(const C_Device device, void** address, size_t size) {
    std::lock_guard<std::mutex> guard(lock);
    auto& memory = memories[device->id];
    size = pages(size);
    if (memory.used + size > limit() || memory.next + size > kSpan) return C_FAILED;
    *address = memory.tensors + memory.next;
    memory.next += size, memory.used += size;  // addresses are not used twice
    return C_SUCCESS;
}

C_Status release(const C_Device device, void* address, size_t size) {
    close_pages();
    std::lock_guard<std::mutex> guard(lock);
    memories[device->id].used -= pages(size);
    madvise(real(address), pages(size), MADV_REMOVE);
    return C_SUCCESS;
}

C_Status fill(const C_Device, void* address, unsigned char value, size_t size) {
    return std::memset(real(address), value, size), C_SUCCESS;
}

C_Status allocate_host(const C_Device, void** address, size_t size) {
    return (*address = std::malloc(size)) ? C_SUCCESS : C_FAILED;
}

C_Status release_host(const C_Device, void* address, size_t) { return std::free(address), C_SUCCESS; }

C_Status to_device(const C_Device, void* target, const void* source, size_t size) {
    if (size == 0) return C_SUCCESS;  // the address of an empty tensor is null
    close_pages();
    return std::memcpy(real(target), source, size), C_SUCCESS;
}

C_Status to_host(const C_Device, void* target, const void* source, size_t size) {
    if (size == 0) return C_SUCCESS;
    close_pages();
    return std::memcpy(target, real(source), size), C_SUCCESS;
}

C_Status within(const C_Device, void* target, const void* source, size_t size) {
    if (size == 0) return C_SUCCESS;
    close_pages();
    return std::memcpy(real(target), real(source), size), C_SUCCESS;
}

C_Status between(const C_Device, const C_Device device, void* target, const void* source, size_t size) {
    return within(device, target, source, size);
}

template <C_Status (*copy)(const C_Device, void*, const void*, size_t)>
C_Status later(const C_Device device, C_Stream, void* target, const void* source, size_t size) {
    return copy(device, target, source, size);
}

C_Status between_later(const C_Device, const C_Device device, C_Stream, void* target, const void* source, size_t size) {
    return within(device, target, source, size);
}

C_Status get_count(size_t* count) { return *count = kDevices, C_SUCCESS; }

C_Status get_list(size_t* list) {
    for (size_t device = 0; device < kDevices; ++device) list[device] = device;
    return C_SUCCESS;
}

C_Status get_memory(const C_Device device, size_t* total, size_t* free) {
    return *total = limit(), *free = limit() - memories[device->id].used, C_SUCCESS;
}

C_Status get_chunk(const C_Device, size_t* size) { return *size = 256, C_SUCCESS; }

}  // namespace

extern "C" void InitPlugin(CustomRuntimeParams* params) {
    PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
    static char type[] = "stub", version[] = "1";
    params->device_type = type, params->sub_device_type = version;
    auto& api = *params->interface;
    std::memset(&api, 0, sizeof(api));
    api.size = sizeof(api);
    api.initialize = initialize, api.finalize = finalize;
    api.init_device = init_device, api.deinit_device = on_device;
    api.set_device = set_device, api.get_device = get_device;
    api.create_stream = create<C_Stream>, api.destroy_stream = destroy<C_Stream>, api.query_stream = done<C_Stream>;
    api.stream_add_callback = call_back;
    api.create_event = create<C_Event>, api.destroy_event = destroy<C_Event>, api.query_event = done<C_Event>;
    api.record_event = api.stream_wait_event = done<C_Stream, C_Event>;
    api.synchronize_device = on_device, api.synchronize_stream = done<C_Stream>, api.synchronize_event = done<C_Event>;
    api.device_memory_allocate = allocate, api.device_memory_deallocate = release, api.device_memory_set = fill;
    api.host_memory_allocate = allocate_host, api.host_memory_deallocate = release_host;
    api.memory_copy_h2d = to_device, api.async_memory_copy_h2d = later<to_device>;
    api.memory_copy_d2h = to_host, api.async_memory_copy_d2h = later<to_host>;
    api.memory_copy_d2d = within, api.async_memory_copy_d2d = later<within>;
    api.memory_copy_p2p = between, api.async_memory_copy_p2p = between_later;
    api.get_device_count = get_count, api.get_device_list = get_list;
    api.device_memory_stats = get_memory, api.device_min_chunk_size = get_chunk;
    set_collectives(api);
}
