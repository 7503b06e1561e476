// Registration of kernels without code: a static program accepts an operator only if a kernel of its dtype is registered.
#include "paddle/phi/core/kernel_factory.h"

using phi::DataType;

extern "C" void register_stubs(const char* name) {
  auto& keys = phi::KernelFactory::Instance().kernels()[name];
  for (DataType dtype : {DataType::FLOAT16, DataType::BFLOAT16}) {
    keys.emplace(phi::KernelKey(phi::Backend::CPU, phi::DataLayout::ALL_LAYOUT, dtype), phi::Kernel());
  }
}

extern "C" void remove_stubs(const char* name) { phi::KernelFactory::Instance().kernels().erase(name); }
