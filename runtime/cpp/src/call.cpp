#include "call.h"

#include <algorithm>

#include "llama_runtime/error.h"

namespace llama_runtime {
namespace {

[[noreturn]] void refuse(const std::string& message, const std::string& where) {
  throw Error(ErrorCode::kInput, message, where);
}

void check_names(const Signature& signature, const std::map<std::string, Tensor>& inputs) {
  std::string expected, missing, unknown;
  const auto add = [](std::string& list, const std::string& name) {
    list += (list.empty() ? "" : ", ") + name;
  };
  for (const TensorSpec& spec : signature.inputs) {
    add(expected, spec.name);
    if (!inputs.contains(spec.name)) add(missing, spec.name);
  }
  for (const auto& input : inputs) {
    const bool is_known =
        std::any_of(signature.inputs.begin(), signature.inputs.end(),
                    [&](const TensorSpec& spec) { return spec.name == input.first; });
    if (!is_known) add(unknown, input.first);
  }
  if (missing.empty() && unknown.empty()) return;
  std::string message = "expected the inputs " + expected;
  if (!missing.empty()) message += "; missing: " + missing;
  if (!unknown.empty()) message += "; unknown: " + unknown;
  refuse(message, "inputs");
}

void bind(const Signature& signature, const TensorSpec& spec, const Tensor& tensor, Sizes& sizes) {
  const std::string mismatch = "expected shape " + show(spec.shape) + ", got " + show(tensor.shape);
  if (tensor.shape.size() != spec.shape.size()) refuse(mismatch, spec.name);
  for (size_t i = 0; i < spec.shape.size(); ++i) {
    const int64_t size = tensor.shape[i];
    if (const auto* number = std::get_if<int64_t>(&spec.shape[i])) {
      if (*number != size) refuse(mismatch, spec.name);
      continue;
    }
    const Dim& dim = *signature.dim(std::get<std::string>(spec.shape[i]));
    const int64_t known = sizes.emplace(dim.name, size).first->second;
    if (known != size) {
      refuse("expected " + dim.name + " = " + std::to_string(known) + " as in other inputs, got " +
                 std::to_string(size),
             spec.name);
    }
    if (size < dim.min || size > dim.max) {
      refuse("expected " + dim.name + " from " + std::to_string(dim.min) + " to " +
                 std::to_string(dim.max) + ", got " + std::to_string(size),
             spec.name);
    }
  }
}

template <typename T>
std::pair<int64_t, int64_t> range(const Tensor& tensor) {
  const auto* data = static_cast<const T*>(tensor.data.get());
  const auto [low, high] = std::minmax_element(data, data + tensor.numel());
  return {static_cast<int64_t>(*low), static_cast<int64_t>(*high)};
}

std::pair<int64_t, int64_t> value_range(const Tensor& tensor) {
  switch (tensor.dtype) {
    case DType::i64:
      return range<int64_t>(tensor);
    case DType::i32:
      return range<int32_t>(tensor);
    case DType::i16:
      return range<int16_t>(tensor);
    case DType::i8:
      return range<int8_t>(tensor);
    case DType::f32:
      return range<float>(tensor);
    case DType::f64:
      return range<double>(tensor);
    default:
      return range<uint8_t>(tensor);
  }
}

void check_states(const Signature& signature, const std::string& entry, const States* states,
                  Sizes& sizes) {
  if (signature.states.empty()) {
    if (states && !states->specs().empty()) refuse("`" + entry + "` has no states", "states");
    return;
  }
  if (states == nullptr) refuse("`" + entry + "` needs its states", "states");
  if (!are_same_states(signature.states, states->specs())) {
    refuse("expected the states of `" + entry + "`, got others", "states");
  }
  for (const auto& [name, size] : states->sizes()) {
    const int64_t known = sizes.emplace(name, size).first->second;
    if (known != size) {
      refuse("expected " + name + " = " + std::to_string(known) + " as in the inputs, got " +
                 std::to_string(size),
             "states");
    }
  }
}

}  // namespace

Sizes check_call(const Signature& signature, const std::string& entry, const States* states,
                 const std::map<std::string, Tensor>& inputs) {
  check_names(signature, inputs);
  Sizes sizes;
  for (const TensorSpec& spec : signature.inputs) {
    const Tensor& tensor = inputs.at(spec.name);
    bind(signature, spec, tensor, sizes);
    if (tensor.dtype != spec.dtype) {
      refuse("expected " + std::string(dtype_row(spec.dtype).name) + ", got " +
                 std::string(dtype_row(tensor.dtype).name),
             spec.name);
    }
  }
  check_states(signature, entry, states, sizes);
  for (const TensorSpec& spec : signature.inputs) {
    if (!spec.values) continue;
    const auto [smallest, largest] = value_range(inputs.at(spec.name));
    check_values(spec, smallest, largest, sizes);
  }
  return sizes;
}

void check_values(const TensorSpec& spec, int64_t smallest, int64_t largest, const Sizes& sizes) {
  if (!spec.values) return;
  const Bounds& bounds = *spec.values;
  if (smallest < bounds.min) {
    refuse("expected at least " + std::to_string(bounds.min) + ", got " + std::to_string(smallest),
           spec.name);
  }
  if (bounds.span) {
    const int64_t span = sizes.at(*bounds.span);
    if (largest > bounds.max - span + 1) {
      refuse("expected " + spec.name + " + " + *bounds.span + " - 1 at most " +
                 std::to_string(bounds.max) + ", got " + std::to_string(largest) + " + " +
                 std::to_string(span) + " - 1",
             spec.name);
    }
    return;
  }
  int64_t allowed = bounds.max;
  if (bounds.dim) {
    int64_t limit = 0;
    const bool is_over = __builtin_mul_overflow(bounds.scale, sizes.at(*bounds.dim), &limit) ||
                         __builtin_add_overflow(limit, bounds.offset, &limit);
    if (!is_over) allowed = std::min(allowed, limit);
  }
  if (largest > allowed) {
    refuse("expected at most " + std::to_string(allowed) + ", got " + std::to_string(largest),
           spec.name);
  }
}

void check_results(const ProgramRecord& record, const std::vector<Tensor>& results,
                   const Sizes& sizes) {
  const std::vector<TensorSpec>& specs = record.signature.outputs;
  bool is_right = results.size() == specs.size();
  for (size_t i = 0; is_right && i < specs.size(); ++i) {
    is_right =
        results[i].dtype == specs[i].dtype && results[i].shape == resolve(specs[i].shape, sizes);
  }
  if (!is_right) {
    throw Error(ErrorCode::kIntegrity,
                "`" + record.entry + "` gave other results than its signature declares",
                record.file, "build the bundle again");
  }
}

}  // namespace llama_runtime
