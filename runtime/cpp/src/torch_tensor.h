// Tensors of this library as ATen tensors over the same memory, and back.
#pragma once

#include <ATen/core/Tensor.h>

#include "llama_runtime/tensor.h"

namespace llama_runtime {

// Does not own: `tensor` must outlive the result.
at::Tensor to_aten(const Tensor& tensor);
// Shares the memory; copies where it is not contiguous.
Tensor from_aten(const at::Tensor& tensor);

}  // namespace llama_runtime
