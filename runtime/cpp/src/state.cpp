#include "llama_runtime/state.h"

#include <set>

#include "cuda.h"
#include "llama_runtime/error.h"

namespace llama_runtime {
namespace {

template <typename Names>
std::string listed(const Names& names, const char* none) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? none : text;
}

void check_sizes(const Signature& signature, const Sizes& sizes) {
  std::set<std::string> needed, given;
  for (const TensorSpec& spec : signature.states) {
    for (const Size& size : spec.shape) {
      if (const auto* name = std::get_if<std::string>(&size)) needed.insert(*name);
    }
  }
  for (const auto& [name, size] : sizes) given.insert(name);
  if (needed != given) {
    throw Error(
        ErrorCode::kInput,
        "expected " + listed(needed, "no sizes") + " for new states, got " + listed(given, "none"),
        "states");
  }
  for (const auto& [name, size] : sizes) {
    const Dim& dim = *signature.dim(name);
    if (size < dim.min || size > dim.max) {
      throw Error(ErrorCode::kInput,
                  "expected " + name + " from " + std::to_string(dim.min) + " to " +
                      std::to_string(dim.max) + ", got " + std::to_string(size),
                  "states");
    }
  }
}

}  // namespace

States::States(const Signature& signature, const Sizes& sizes, int cuda_device)
    : specs_(signature.states), sizes_(sizes) {
  check_sizes(signature, sizes);
  for (const TensorSpec& spec : specs_) {
    const std::vector<int64_t> shape = resolve(spec.shape, sizes);
    tensors_.push_back(cuda_device < 0 ? Tensor::zeros(spec.dtype, shape)
                                       : cuda_zeros(spec.dtype, shape, cuda_device));
  }
}

int64_t States::nbytes() const {
  int64_t total = 0;
  for (const Tensor& tensor : tensors_) total += tensor.nbytes();
  return total;
}

bool are_same_states(const std::vector<TensorSpec>& first, const std::vector<TensorSpec>& second) {
  if (first.size() != second.size()) return false;
  for (size_t i = 0; i < first.size(); ++i) {
    if (first[i].name != second[i].name || first[i].dtype != second[i].dtype ||
        first[i].shape != second[i].shape) {
      return false;
    }
  }
  return true;
}

}  // namespace llama_runtime
