// A program of any format that is ready to run.
#pragma once

#include <vector>

#include "llama_runtime/tensor.h"

namespace llama_runtime {

class LoadedProgram {
 public:
  LoadedProgram() = default;
  LoadedProgram(const LoadedProgram&) = delete;
  LoadedProgram& operator=(const LoadedProgram&) = delete;
  virtual ~LoadedProgram() = default;

  // Arguments in the order of the signature: inputs, then states, which are written in place.
  // Trusts its caller; calls from several threads wait for each other. Results are the caller's.
  virtual std::vector<Tensor> run(const std::vector<Tensor>& arguments) = 0;
};

}  // namespace llama_runtime
