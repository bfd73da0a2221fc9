// How the next token is chosen from the logits.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "llama_runtime/tensor.h"

namespace llama_runtime {

// The default is greedy. The filters apply in the order temperature, top_k, top_p, min_p.
struct SamplingParams {
  double temperature = 0.0;      // divides the logits; below 1e-5 the likeliest token is taken
  int64_t top_k = 0;             // keeps the k likeliest; 0 keeps all
  double top_p = 1.0;            // keeps the likeliest that reach this sum; 0 keeps one
  double min_p = 0.0;            // keeps those with this share of the likeliest's probability
  std::optional<uint64_t> seed;  // makes the draws repeatable

  bool is_greedy() const { return temperature < 1e-5 || top_k == 1 || top_p == 0.0; }
};

// Chooses tokens; row r draws from a generator of its own. For equal logits, parameters and seed
// it gives the tokens that the Python runtime gives with the same torch. Not for use from two
// threads at the same time.
class Sampler {
 public:
  // Throws Error(kInput): a field is out of range.
  explicit Sampler(const SamplingParams& params);
  ~Sampler();
  Sampler(Sampler&&) noexcept;

  // One token for each row of logits [B, V] of a floating dtype. Throws Error(kInput): another
  // shape or dtype, or a row without a finite maximum; nothing was drawn.
  std::vector<int32_t> sample(const Tensor& logits);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace llama_runtime
