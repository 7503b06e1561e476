// Consecutive arrays in one block of memory.
#pragma once

#include "api.h"

namespace plx {

// Each array is aligned to 64 bytes if the block is aligned to 64 bytes. With a null block, only the total size is
// computed.
class Arrays {
  public:
    explicit Arrays(void* block) : block_(static_cast<char*>(block)) {}

    template <class Value>
    Value* take(i64 count) {
        char* const found = block_ == nullptr ? nullptr : block_ + bytes_;
        bytes_ += (count * i64(sizeof(Value)) + 63) / 64 * 64;
        return reinterpret_cast<Value*>(found);
    }
    i64 bytes() const { return bytes_; }

  private:
    char* const block_;
    i64 bytes_ = 0;
};

}  // namespace plx
