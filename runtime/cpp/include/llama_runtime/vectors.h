// Test vectors: inputs and expected outputs that travel in a bundle, and no model code.
//
// The format is described in `runtime/llama_runtime/vectors.py`.
#pragma once

#include <string>
#include <vector>

#include "llama_runtime/model.h"

namespace llama_runtime {

// One program against its vectors. `figure` is the largest difference of a float output as a share
// of the largest expected value, or the number of wrong integers; NaN where it could not be run.
struct VectorResult {
  std::string entry;
  std::string format;
  double figure = 0;
  double limit = 0;
  std::string detail;

  bool passed() const { return figure <= limit; }
};

// Runs every program that `Model::runs` and that has vectors; not its variants.
// Throws Error(kIntegrity): a file of vectors is damaged.
std::vector<VectorResult> check_vectors(Model& model);

}  // namespace llama_runtime
