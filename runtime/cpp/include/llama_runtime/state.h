// The tensors that a program reads and writes in place.
#pragma once

#include <string>
#include <vector>

#include "llama_runtime/manifest.h"
#include "llama_runtime/tensor.h"

namespace llama_runtime {

// One set of states, in the order of the signature. Programs whose declared states are equal may
// share one set. Owned by the caller; not for two calls at the same time.
class States {
 public:
  // All zero, on the host without touching the memory. `cuda_device` is the number of the device
  // that they lie on, or -1. `sizes` are those of dynamic dimensions, such as
  // `PoolPages` of a pool, and no others.
  // Throws Error(kInput): one is missing, unknown, or out of its range.
  explicit States(const Signature& signature, const Sizes& sizes = {}, int cuda_device = -1);

  const std::vector<TensorSpec>& specs() const { return specs_; }
  const std::vector<Tensor>& tensors() const { return tensors_; }
  const Sizes& sizes() const { return sizes_; }
  int64_t nbytes() const;

 private:
  std::vector<TensorSpec> specs_;
  std::vector<Tensor> tensors_;
  Sizes sizes_;
};

// Whether programs with these declared states may share one set.
bool are_same_states(const std::vector<TensorSpec>& first, const std::vector<TensorSpec>& second);

}  // namespace llama_runtime
