// Communication between processes that use the device type "stub".
//
// The processes of a communicator map the same memory. It has a counter for
// barriers, one piece per process for collectives, and one mailbox per ordered
// pair of processes for messages. A mailbox holds one piece of a message, so a
// longer message waits for its receiver.
//
// Reductions are computed in the order of the ranks, in float32 for float16 and
// bfloat16. They accept the types that HCCL, the library of Ascend devices,
// accepts: neither bool and unsigned integers nor float64. A process waits at
// most STUB_DEVICE_SECONDS (default: 300) for the others.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "paddle/phi/common/bfloat16.h"
#include "paddle/phi/common/float16.h"
#include "plugin.h"

namespace {

constexpr size_t kPiece = size_t{1} << 16, kIdSize = 64;

using Counter = std::atomic<uint64_t>;

struct Mailbox {
    Counter written, read;  // number of pieces
    char piece[kPiece];
};

struct Communicator {
    size_t rank, size;
    char* memory;  // new memory is filled with zeros

    size_t bytes() const { return (1 + size) * kPiece + size * size * sizeof(Mailbox); }
    Counter& arrived() const { return *reinterpret_cast<Counter*>(memory); }
    char* piece(size_t rank) const { return memory + (1 + rank) * kPiece; }
    Mailbox* mailbox(size_t from, size_t to) const {
        return reinterpret_cast<Mailbox*>(piece(size)) + from * size + to;
    }
};

Communicator& of(C_CCLComm comm) { return *reinterpret_cast<Communicator*>(comm); }

// Calls `is_done` until it returns true; returns false after the time limit.
template <typename F>
bool wait_until(const F& is_done) {
    const char* limit = std::getenv("STUB_DEVICE_SECONDS");
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(limit ? std::atoi(limit) : 300);
    for (int tries = 0; !is_done(); ++tries) {
        if (std::chrono::steady_clock::now() > end) {
            std::fprintf(stderr, "stub device: another process did not join a collective in time\n");
            return false;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(std::min(tries, 1000)));
    }
    return true;
}

bool barrier(const Communicator& group) {
    const auto round = group.arrived().fetch_add(1) / group.size;
    return wait_until([&] { return group.arrived() >= (round + 1) * group.size; });
}

C_Status get_id_size(size_t* size) { return *size = kIdSize, C_SUCCESS; }

// The id is the path of a memory file of this process.
C_Status get_id(C_CCLRootId* id) {
    const int file = memfd_create("stub device communicator", 0);
    std::snprintf(static_cast<char*>(id->data), kIdSize, "/proc/%d/fd/%d", getpid(), file);
    return file < 0 ? C_FAILED : C_SUCCESS;
}

C_Status connect(size_t size, C_CCLRootId* id, size_t rank, C_CCLComm* comm) {
    auto* group = new Communicator{rank, size, nullptr};
    const int file = open(static_cast<const char*>(id->data), O_RDWR);
    if (file < 0 || ftruncate(file, group->bytes())) return C_FAILED;
    void* memory = mmap(nullptr, group->bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) return C_FAILED;
    group->memory = static_cast<char*>(memory);
    *comm = reinterpret_cast<C_CCLComm>(group);
    return barrier(*group) ? C_SUCCESS : C_FAILED;
}

C_Status disconnect(C_CCLComm comm) {
    munmap(of(comm).memory, of(comm).bytes());
    return delete &of(comm), C_SUCCESS;
}

C_Status get_name(C_CCLComm, char* name) { return std::strcpy(name, "stub"), C_SUCCESS; }

size_t size_of(C_DataType type) {
    static constexpr size_t sizes[] = {0, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 2, 8, 16};  // in the order of C_DataType
    return sizes[type];
}

// Publishes `size` bytes of every process that sends, piece by piece; calls
// `use(start, size)` while the pieces of all processes are there.
template <typename F>
C_Status exchange(const Communicator& group, const void* sent, size_t size, const F& use) {
    close_pages();
    for (size_t start = 0; start < size; start += kPiece) {
        const size_t length = std::min(kPiece, size - start);
        if (sent) std::memcpy(group.piece(group.rank), real(sent) + start, length);
        if (!barrier(group)) return C_FAILED;
        use(start, length);
        if (!barrier(group)) return C_FAILED;
    }
    return C_SUCCESS;
}

// Reduces the pieces of all processes, as values of type T, in the type Sum.
template <typename T, typename Sum>
void combine(const Communicator& group, C_CCLReduceOp op, void* result, size_t size) {
    for (size_t i = 0; i < size / sizeof(T); ++i) {
        const auto value_of = [&](size_t rank) { return static_cast<Sum>(reinterpret_cast<T*>(group.piece(rank))[i]); };
        Sum total = value_of(0);
        for (size_t rank = 1; rank < group.size; ++rank) {
            const Sum value = value_of(rank);
            if (op == SUM || op == AVG) total += value;
            if (op == PRODUCT) total *= value;
            if (op == MAX) total = std::max(total, value);
            if (op == MIN) total = std::min(total, value);
        }
        if (op == AVG) total /= group.size;
        static_cast<T*>(result)[i] = static_cast<T>(total);
    }
}

using Combine = void (*)(const Communicator&, C_CCLReduceOp, void*, size_t);

Combine combine_of(C_DataType type) {
    if (type == INT8) return combine<int8_t, int64_t>;
    if (type == INT16) return combine<int16_t, int64_t>;
    if (type == INT32) return combine<int32_t, int64_t>;
    if (type == INT64) return combine<int64_t, int64_t>;
    if (type == FLOAT16) return combine<phi::dtype::float16, float>;
    if (type == BFLOAT16) return combine<phi::dtype::bfloat16, float>;
    if (type == FLOAT32) return combine<float, float>;
    std::fprintf(stderr, "stub device: no reduction of values of type %d\n", type);
    return nullptr;
}

C_Status reduce(void* sent, void* received, size_t count, C_DataType type, C_CCLReduceOp op, size_t root,
                C_CCLComm comm, C_Stream) {
    const auto& group = of(comm);
    const auto combine = combine_of(type);
    if (!combine) return C_ERROR;
    return exchange(group, sent, count * size_of(type), [&](size_t start, size_t size) {
        if (root == group.rank || root == group.size) combine(group, op, real(received) + start, size);
    });
}

C_Status all_reduce(void* sent, void* received, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm comm,
                    C_Stream stream) {
    return reduce(sent, received, count, type, op, of(comm).size, comm, stream);  // no process is the only root
}

C_Status reduce_scatter(void* sent, void* received, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm comm,
                        C_Stream stream) {
    auto* start = static_cast<char*>(sent);
    for (size_t rank = 0; rank < of(comm).size; ++rank, start += count * size_of(type)) {
        const auto status = reduce(start, received, count, type, op, rank, comm, stream);
        if (status != C_SUCCESS) return status;
    }
    return C_SUCCESS;
}

C_Status broadcast(void* values, size_t count, C_DataType type, size_t root, C_CCLComm comm, C_Stream) {
    const auto& group = of(comm);
    const bool is_root = group.rank == root;
    return exchange(group, is_root ? values : nullptr, count * size_of(type), [&](size_t start, size_t size) {
        if (!is_root) std::memcpy(real(values) + start, group.piece(root), size);
    });
}

C_Status all_gather(void* sent, void* received, size_t count, C_DataType type, C_CCLComm comm, C_Stream) {
    const auto& group = of(comm);
    const size_t bytes = count * size_of(type);
    return exchange(group, sent, bytes, [&](size_t start, size_t size) {
        for (size_t rank = 0; rank < group.size; ++rank)
            std::memcpy(real(received) + rank * bytes + start, group.piece(rank), size);
    });
}

struct Message {
    bool is_sent;
    Mailbox* mailbox;
    char* data;
    size_t size, done;

    bool shares_end(const Message& other) const { return is_sent == other.is_sent && mailbox == other.mailbox; }

    // Transfers one piece if the mailbox allows it.
    void advance() {
        const size_t length = std::min(kPiece, size - done);
        const bool is_full = mailbox->written != mailbox->read;
        if (is_full == is_sent) return;
        if (is_sent)
            std::memcpy(mailbox->piece, data + done, length);
        else
            std::memcpy(data + done, mailbox->piece, length);
        ++(is_sent ? mailbox->written : mailbox->read);
        done += length;
    }
};

thread_local int open_groups = 0;
thread_local std::vector<Message> waiting;

// Transfers all messages at once; the order of messages between two processes is kept.
C_Status transfer() {
    close_pages();
    const bool is_done = wait_until([] {
        for (auto message = waiting.begin(); message != waiting.end();) {
            const auto is_same = [&](const Message& other) { return other.shares_end(*message); };
            if (std::none_of(waiting.begin(), message, is_same)) message->advance();
            message = message->done == message->size ? waiting.erase(message) : message + 1;
        }
        return waiting.empty();
    });
    return waiting.clear(), is_done ? C_SUCCESS : C_FAILED;
}

C_Status begin_group() { return ++open_groups, C_SUCCESS; }
C_Status end_group() { return --open_groups ? C_SUCCESS : transfer(); }

C_Status add(bool is_sent, const void* data, size_t size, Mailbox* mailbox) {
    if (size > 0) waiting.push_back({is_sent, mailbox, real(data), size, 0});
    return open_groups ? C_SUCCESS : transfer();
}

C_Status send(void* data, size_t count, C_DataType type, size_t target, C_CCLComm comm, C_Stream) {
    return add(true, data, count * size_of(type), of(comm).mailbox(of(comm).rank, target));
}

C_Status receive(void* data, size_t count, C_DataType type, size_t source, C_CCLComm comm, C_Stream) {
    return add(false, data, count * size_of(type), of(comm).mailbox(source, of(comm).rank));
}

C_Status all_to_all(const void** sent, const size_t* num_sent, const C_DataType* sent_types, void** received,
                    const size_t* num_received, const C_DataType* received_types, size_t, size_t size, C_CCLComm comm,
                    C_Stream stream) {
    begin_group();
    for (size_t rank = 0; rank < size; ++rank) {
        send(const_cast<void*>(sent[rank]), num_sent[rank], sent_types[rank], rank, comm, stream);
        receive(received[rank], num_received[rank], received_types[rank], rank, comm, stream);
    }
    return end_group();
}

}  // namespace

void set_collectives(C_DeviceInterface& api) {
    api.xccl_get_unique_id_size = get_id_size, api.xccl_get_unique_id = get_id;
    api.xccl_comm_init_rank = connect, api.xccl_destroy_comm = disconnect, api.xccl_get_comm_name = get_name;
    api.xccl_all_reduce = all_reduce, api.xccl_reduce = reduce, api.xccl_reduce_scatter = reduce_scatter;
    api.xccl_broadcast = broadcast, api.xccl_all_gather = all_gather, api.xccl_all_to_all = all_to_all;
    api.xccl_group_start = begin_group, api.xccl_group_end = end_group;
    api.xccl_send = send, api.xccl_recv = receive;
}
