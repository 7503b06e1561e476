// Entry points of the CPU library, and the structs that cross its boundary.
//
// Each header api_*.h declares the entry points of a group of ops. Python parses argument types and struct layouts from
// all headers api*.h (ops/cpp/api_header.py). The parser supports `Status name(type parameter, ...);` and
// `struct Name { type field; ... };` with one field per declaration, and the types i64, float, double, bool and
// pointers.
//
// Arrays are contiguous and row-major unless a comment states otherwise. Shapes are written [rows, columns]. An array
// of type void* holds bf16 if the flag `is_bf16` is set, and float otherwise. Comments state which gradients may be
// null; a null gradient is not computed.
#pragma once

#include "api_attention.h"
#include "api_convolution.h"
#include "api_decoding.h"
#include "api_elementwise.h"
#include "api_linear.h"
#include "api_optimizers.h"
#include "api_recurrence.h"
#include "api_training_blocks.h"

namespace plx {

#pragma GCC visibility push(default)
extern "C" {

// Message of the last error in the calling thread.
const char* last_error();

// -- library ----------------------------------------------------------------------------------------------------------

Status get_threads(i64* count);
Status set_threads(i64 count);

// Sets `result` to 1 if oneDNN has bfloat16 matmuls for this processor (they need AVX-512), and to 0 otherwise. Without
// them, the products of bfloat16 matrices are computed in float.
Status has_bf16_products(i64* result);

// Allocates an uninitialized tensor and sets `tensor` to its DLManagedTensor. `code` and `bits` are the dtype code and
// the bits of DLPack's DLDataType.
Status buffers_new(i64 code, i64 bits, i64 dims, const i64* shape, void** tensor);

// Writes to numbers [3]: mapped bytes, bytes in use, and peak bytes in use.
Status buffers_account(i64* numbers);

// Returns all unused blocks to the operating system.
Status buffers_release();

}  // extern "C"
#pragma GCC visibility pop

}  // namespace plx
