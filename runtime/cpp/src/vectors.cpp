#include "llama_runtime/vectors.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "llama_runtime/error.h"
#include "strict_json.h"
#include "text.h"

namespace llama_runtime {
namespace {

constexpr int64_t kAnything = -1;  // in place of an integer that is not compared

struct Call {
  std::map<std::string, Tensor> inputs, rows, outputs;
};

struct Vectors {
  double fill = 0;
  Sizes sizes;
  std::vector<Call> calls;
};

struct Finding {
  double figure = -1;
  std::string detail = "nothing is expected";

  // Keeps the larger one; NaN is larger than all.
  void take(double other, const std::string& text) {
    if (other <= figure) return;
    figure = other;
    detail = text;
  }
};

double limit_of(DType dtype) {
  return dtype == DType::f32 ? 1e-4 : dtype == DType::f16 ? 2e-2 : 1e-1;
}

[[noreturn]] void refuse(const std::string& message, const std::string& where) {
  throw Error(ErrorCode::kIntegrity, message, where);
}

// Splits `calls.<i>.<kind>.<name>` and returns the map that the tensor belongs to.
void place(std::map<int, Call>& calls, const std::string& key, const Tensor& tensor,
           const std::string& where) {
  const std::string unknown = "unknown tensor " + shown(key);
  if (!key.starts_with("calls.")) refuse(unknown, where);
  const size_t dot = key.find('.', 6), second = key.find('.', dot + 1);
  if (dot == key.npos || second == key.npos) refuse(unknown, where);
  int number = -1;
  const char* end = key.data() + dot;
  if (dot - 6 > 6 || std::from_chars(key.data() + 6, end, number).ptr != end || number < 0) {
    refuse(unknown, where);
  }
  const std::string kind = key.substr(dot + 1, second - dot - 1);
  const std::string name = key.substr(second + 1);
  Call& call = calls[number];
  if (kind == "inputs") {
    call.inputs[name] = tensor;
  } else if (kind == "rows") {
    call.rows[name] = tensor;
  } else if (kind == "outputs") {
    call.outputs[name] = tensor;
  } else {
    refuse(unknown, where);
  }
}

std::string metadata(const MappedWeights& file, const std::string& key, const std::string& where) {
  const auto found = file.header.metadata.find(key);
  if (found == file.header.metadata.end()) refuse("its calls or metadata are incomplete", where);
  return found->second;
}

Vectors read_vectors(const Bundle& bundle, const std::string& entry) {
  const std::string name = vectors_name(entry);
  check_digest(bundle, name);
  const std::string where = bundle.path(name).string();
  const MappedWeights file = map_safetensors(bundle.path(name));
  const std::string version = metadata(file, "version", where);
  if (version != "1") refuse("expected vectors of version 1, got " + shown(version), where);
  if (metadata(file, "entry", where) != entry) refuse("expected vectors of `" + entry + "`", where);
  Vectors vectors;
  vectors.fill = std::strtod(metadata(file, "fill", where).c_str(), nullptr);
  const std::string sizes = metadata(file, "sizes", where);
  for (const Member& member : parse_object(sizes, where, ErrorCode::kIntegrity)) {
    const auto* size = std::get_if<int64_t>(&member.value.value);
    if (size == nullptr) refuse("its calls or metadata are incomplete", where);
    vectors.sizes[member.key] = *size;
  }
  std::map<int, Call> calls;
  for (const auto& [key, tensor] : file.tensors) place(calls, key, tensor, where);
  for (auto& [number, call] : calls) {
    if (number != static_cast<int>(vectors.calls.size())) {
      refuse("its calls or metadata are incomplete", where);
    }
    vectors.calls.push_back(std::move(call));
  }
  return vectors;
}

void compare_floats(const std::vector<float>& actual, const std::vector<float>& expected,
                    double limit, const std::string& place, Finding& finding) {
  double largest = 0, scale = 0;
  size_t worst = 0;
  for (size_t i = 0; i < expected.size() && !std::isnan(largest); ++i) {
    const double difference = std::fabs(double{actual[i]} - double{expected[i]});
    scale = std::max(scale, std::fabs(double{expected[i]}));
    if (difference <= largest) continue;
    largest = difference;  // also NaN
    worst = i;
  }
  if (expected.empty()) return;
  char text[96];
  std::snprintf(text, sizeof text, "max diff %.3g at element %zu, atol %.3g", largest, worst,
                limit * scale);
  finding.take(scale > 0 ? largest / scale : largest, place + text);
}

void compare_integers(const std::vector<int64_t>& actual, const std::vector<int64_t>& expected,
                      const std::string& place, Finding& finding) {
  int64_t num_wrong = 0, num_compared = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (expected[i] == kAnything) continue;
    ++num_compared;
    num_wrong += actual[i] != expected[i];
  }
  if (num_compared == 0) return;
  finding.take(static_cast<double>(num_wrong), place + std::to_string(num_wrong) + " of " +
                                                   std::to_string(num_compared) + " differ");
}

// The chosen rows of an output that is seen as [-1, width].
template <typename T>
std::vector<T> chosen(const std::vector<T>& values, const std::vector<int64_t>& rows, size_t width,
                      const std::string& name) {
  std::vector<T> result;
  for (const int64_t row : rows) {
    const size_t start = static_cast<size_t>(row) * width;
    if (row < 0 || start + width > values.size()) {
      refuse("expects row " + std::to_string(row) + " of `" + name + "`, which has fewer", "");
    }
    const auto first = values.begin() + static_cast<std::ptrdiff_t>(start);
    result.insert(result.end(), first, first + static_cast<std::ptrdiff_t>(width));
  }
  return result;
}

Finding run_calls(Entry& entry, const Vectors& vectors, double limit) {
  std::optional<States> states;
  if (!entry.signature().states.empty()) {
    states.emplace(entry.new_states(vectors.sizes));
    for (const Tensor& tensor : states->tensors()) fill(tensor, vectors.fill);
  }
  Finding finding;
  for (size_t number = 0; number < vectors.calls.size(); ++number) {
    const Call& call = vectors.calls[number];
    const std::vector<Tensor> results = entry.run(states ? &*states : nullptr, call.inputs);
    for (size_t i = 0; i < results.size(); ++i) {
      const std::string& name = entry.signature().outputs[i].name;
      const auto expected = call.outputs.find(name);
      if (expected == call.outputs.end()) continue;
      const auto rows = call.rows.find(name);
      if (rows == call.rows.end() || expected->second.shape.size() != 2) {
        refuse("its calls or metadata are incomplete", "");
      }
      const auto width = static_cast<size_t>(expected->second.shape[1]);
      const std::vector<int64_t> wanted = to_integers(rows->second);
      const std::string place = "call " + std::to_string(number) + ", " + name + ": ";
      if (expected->second.dtype == DType::f32) {
        compare_floats(chosen(to_floats(results[i]), wanted, width, name),
                       to_floats(expected->second), limit, place, finding);
      } else {
        compare_integers(chosen(to_integers(results[i]), wanted, width, name),
                         to_integers(expected->second), place, finding);
      }
    }
  }
  if (finding.figure < 0) finding.figure = std::numeric_limits<double>::quiet_NaN();
  return finding;
}

VectorResult check_program(Model& model, const ProgramRecord& program) {
  VectorResult result{program.entry, program.format, 0, limit_of(program.dtype), ""};
  const Vectors vectors = read_vectors({model.folder(), model.manifest()}, program.entry);
  try {
    const Finding finding = run_calls(*model.open(program), vectors, result.limit);
    result.figure = finding.figure;
    result.detail = finding.detail;
  } catch (const Error& error) {
    result.figure = std::numeric_limits<double>::quiet_NaN();
    result.detail = std::string("cannot be run: ") + error.what();
  }
  return result;
}

}  // namespace

std::vector<VectorResult> check_vectors(Model& model) {
  std::vector<VectorResult> results;
  for (const ProgramRecord& program : model.manifest().programs) {
    const bool has_vectors = model.manifest().file(vectors_name(program.entry)) != nullptr;
    if (program.variant.empty() && has_vectors && model.runs(program)) {
      results.push_back(check_program(model, program));
    }
  }
  return results;
}

}  // namespace llama_runtime
