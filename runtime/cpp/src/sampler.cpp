#include "llama_runtime/sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>

#include "llama_runtime/error.h"
#include "torch_tensor.h"

namespace llama_runtime {
namespace {

constexpr double kMaxTemperature = 1e30;      // beyond it all tokens are equally likely anyway
constexpr int64_t kNumLikely[] = {64, 1024};  // top_p seldom needs more tokens than these
constexpr uint64_t kRowStride = 0x9E3779B97F4A7C15;  // spreads the seeds of the rows

struct Candidates {
  at::Tensor probs;   // [K]; what a filter removed has 0
  at::Tensor tokens;  // [K], or undefined: 0 to V-1
};

void check(bool is_good, const char* where, const char* expected, double got) {
  if (is_good) return;
  char text[32];
  std::snprintf(text, sizeof text, "%g", got);
  throw Error(ErrorCode::kInput, std::string("expected ") + expected + ", got " + text, where);
}

// Sorting all tokens costs far more than the likeliest of them, which mostly suffice.
Candidates best_first(const at::Tensor& probs, double top_p) {
  for (const int64_t count : kNumLikely) {
    const auto [best, tokens] = probs.topk(std::min(count, probs.numel()));
    if (best.to(at::kDouble).sum().item<double>() >= top_p) return {best, tokens};
  }
  const auto [sorted, order] = probs.sort(/*stable=*/true, /*dim=*/-1, /*descending=*/true);
  return {sorted, order};
}

Candidates candidates(const at::Tensor& logits, const SamplingParams& params) {
  // With the maximum at 0 nothing overflows upwards.
  const at::Tensor scaled =
      (logits - logits.amax()) / std::min(params.temperature, kMaxTemperature);
  Candidates found{scaled.softmax(-1), {}};
  if (params.top_k > 0) {
    std::tie(found.probs, found.tokens) =
        found.probs.topk(std::min(params.top_k, found.probs.numel()));
  }
  if (params.top_p < 1.0) {
    double wanted = params.top_p;
    if (found.tokens.defined()) {
      wanted *= found.probs.to(at::kDouble).sum().item<double>();
    } else {
      found = best_first(found.probs, params.top_p);
    }
    const at::Tensor before = found.probs.to(at::kDouble).cumsum(-1) - found.probs;
    found.probs = found.probs.masked_fill(before >= wanted, 0.0);
  }
  if (params.min_p > 0.0) {
    found.probs = found.probs.masked_fill(found.probs < params.min_p * found.probs.amax(), 0.0);
  }
  return found;
}

// The index at which the running sum passes the share `uniform` [1] of the whole sum.
int64_t pick(const at::Tensor& probs, const at::Tensor& uniform) {
  const at::Tensor sums = probs.to(at::kDouble).cumsum(-1);
  const at::Tensor total = sums.slice(0, -1);
  // Rounding must not reach the whole sum, past the last token that has any probability.
  const at::Tensor below_total = at::nextafter(total, at::zeros_like(total));
  const at::Tensor wanted = at::minimum(uniform * total, below_total);
  return at::searchsorted(sums, wanted, /*out_int32=*/false, /*right=*/true).item<int64_t>();
}

}  // namespace

struct Sampler::Impl {
  SamplingParams params;
  std::vector<at::Generator> generators;

  at::Tensor uniform(size_t row) {
    while (generators.size() <= row) {
      at::Generator generator = at::detail::createCPUGenerator();
      if (!params.seed) params.seed = generator.seed();
      generator.set_current_seed(*params.seed + generators.size() * kRowStride);
      generators.push_back(generator);
    }
    return at::rand({1}, generators[row], at::TensorOptions(at::kDouble));
  }
};

Sampler::Sampler(const SamplingParams& params) : impl_(new Impl{params, {}}) {
  check(std::isfinite(params.temperature) && params.temperature >= 0, "temperature",
        "a finite number from 0", params.temperature);
  check(params.top_k >= 0, "top_k", "a whole number from 0", static_cast<double>(params.top_k));
  check(params.top_p >= 0 && params.top_p <= 1, "top_p", "a number from 0 to 1", params.top_p);
  check(params.min_p >= 0 && params.min_p <= 1, "min_p", "a number from 0 to 1", params.min_p);
}

Sampler::~Sampler() = default;
Sampler::Sampler(Sampler&&) noexcept = default;

std::vector<int32_t> Sampler::sample(const Tensor& logits) {
  const c10::InferenceMode guard;
  if (logits.shape.size() != 2 || logits.shape[1] == 0) {
    throw Error(ErrorCode::kInput, "expected shape [B,V], got " + show(logits.shape), "logits");
  }
  at::Tensor rows = to_aten(logits);
  if (!rows.is_floating_point()) {
    throw Error(ErrorCode::kInput,
                "expected floating point, got " + std::string(dtype_row(logits.dtype).name),
                "logits");
  }
  rows = rows.to(at::kFloat);
  const at::Tensor best = rows.amax(-1);
  std::vector<int32_t> tokens;
  for (int64_t row = 0; row < rows.size(0); ++row) {
    check(std::isfinite(best[row].item<float>()), "logits", "a finite maximum",
          best[row].item<float>());
  }
  for (int64_t row = 0; row < rows.size(0); ++row) {
    if (impl_->params.is_greedy()) {
      tokens.push_back(static_cast<int32_t>(rows[row].argmax().item<int64_t>()));
      continue;
    }
    const Candidates found = candidates(rows[row], impl_->params);
    const int64_t index = pick(found.probs, impl_->uniform(static_cast<size_t>(row)));
    tokens.push_back(
        static_cast<int32_t>(found.tokens.defined() ? found.tokens[index].item<int64_t>() : index));
  }
  return tokens;
}

}  // namespace llama_runtime
