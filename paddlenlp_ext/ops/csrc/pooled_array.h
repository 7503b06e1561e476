// Arrays in pooled memory (buffers.cpp), for the intermediate results of an op that calls other ops.
#pragma once

#include <type_traits>
#include <utility>

#include "api.h"

namespace plx {

struct PooledBlock {
    char* data;
    i64 size;
};

// Returns at least `size` bytes, aligned to a page. Throws OutOfMemory.
PooledBlock acquire_block(i64 size);
void release_block(const PooledBlock& block) noexcept;

// Uninitialized array; an empty array has no memory.
template <class Value>
class PooledArray {
  public:
    explicit PooledArray(i64 count)
        : block_(count > 0 ? acquire_block(count * i64(sizeof(Value))) : PooledBlock{nullptr, 0}) {}
    ~PooledArray() {
        if (block_.data != nullptr) release_block(block_);
    }
    PooledArray(PooledArray&& other) noexcept : block_(std::exchange(other.block_, {nullptr, 0})) {}

    Value* data() const { return reinterpret_cast<Value*>(block_.data); }

  private:
    PooledBlock block_;
};

// Array of Values that replaces an array of floats: a pooled copy to fill, or the floats themselves if Value is float.
template <class Value>
class Converted {
  public:
    Converted(const float* from, i64 count) : copy_(is_same_ ? 0 : count) {
        if constexpr (is_same_)
            data_ = const_cast<float*>(from);
        else
            data_ = copy_.data();
    }
    Value* data() const { return data_; }

  private:
    static constexpr bool is_same_ = std::is_same_v<Value, float>;
    PooledArray<Value> copy_;
    Value* data_;
};

}  // namespace plx
