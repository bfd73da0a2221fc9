// The manifest of a bundle, field by field, checked in full when it is read.
//
// A value of these types holds everything that `artifacts/FORMAT.md` asks of one. They are plain
// data: copy them, share them between threads for reading.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "llama_runtime/tensor.h"

namespace llama_runtime {

inline constexpr const char* kManifestName = "manifest.json";
inline constexpr const char* kSignatureName = "model.sig";
inline constexpr const char* kWeightsName = "weights.safetensors";
inline constexpr const char* kTokenizerName = "tokenizer.json";

// Sizes of dimensions by name.
using Sizes = std::map<std::string, int64_t>;

// A number, the name of a dynamic dimension or, in outputs, a multiple of one: `2*Rows`.
using Size = std::variant<int64_t, std::string>;

// A dynamic dimension: any size from `min` to `max`.
struct Dim {
  std::string name;
  int64_t min = 1;
  int64_t max = 1;
};

// The values of an integer input: from `min` to `max`; with `span`, value + that dimension's size
// - 1 must not exceed `max`; with `dim`, the value must not exceed scale * size + offset either.
struct Bounds {
  int64_t min = 0;
  int64_t max = 0;
  std::optional<std::string> span;
  std::optional<std::string> dim;
  int64_t scale = 1;
  int64_t offset = 0;
};

// An input, a state or an output. States have no bounds.
struct TensorSpec {
  std::string name;
  DType dtype = DType::f32;
  std::vector<Size> shape;
  std::optional<Bounds> values;
};

// Arguments are `inputs`, then `states`, in order; results are `outputs`.
struct Signature {
  std::vector<TensorSpec> inputs;
  std::vector<TensorSpec> states;
  std::vector<TensorSpec> outputs;
  std::vector<Dim> dims;

  // nullptr where there is none of that name.
  const Dim* dim(std::string_view name) const;
};

struct Target {
  std::string device;                     // `cpu` or `cuda`
  std::optional<std::string> machine;     // such as `x86_64`, of native code
  std::optional<std::string> isa;         // such as `avx512`
  std::vector<std::string> cpu_flags;     // of /proc/cpuinfo
  std::optional<std::string> capability;  // compute capability of native CUDA code
};

struct ProgramRecord {
  std::string entry;
  std::string format;  // `pt2`, `aoti` or `onnx`
  std::string file;
  DType dtype = DType::f32;
  Target target;
  Signature signature;
  std::vector<std::string> constants;
  std::map<std::string, std::string> requires_;
  Sizes variant;
  std::optional<std::string> numerics;
  int64_t shards = 1;  // processes that run it together

  // The entry, and what the program fixes: `decode_paged:Rows=1`.
  std::string label() const;
};

// A longer file has a digest for each block of so many bytes; the last block may be shorter.
inline constexpr int64_t kBlockBytes = 64 << 20;

struct File {
  int64_t bytes = 0;
  std::string sha256;
  std::vector<std::string> blocks;  // SHA-256 of each kBlockBytes; may be empty
};

struct Source {
  std::string kind;
  std::string name;
  std::optional<std::string> revision;
  std::optional<std::string> license;
};

struct ModelSizes {
  int64_t vocab_size = 0, hidden_size = 0, intermediate_size = 0, num_layers = 0, num_heads = 0;
  int64_t num_kv_heads = 0, head_dim = 0;
  double rms_norm_eps = 0;
  std::string rope;
  bool tie_word_embeddings = false, attention_bias = false, mlp_bias = false;
  int64_t num_parameters = 0;
};

// What a build made of the checkpoint's matrices.
struct Quantized {
  std::string kind;                   // codes of the layers, `int8` or `int4`
  std::optional<int64_t> group_size;  // values of a row that share a scale; none: the whole row
};

// Which part of a stored tensor each of several processes binds.
struct Cut {
  std::string tensor;
  std::string axis;  // `rows` or `columns`
};

struct Check {
  std::string law;
  std::string entry;
  std::string format;
  double figure = 0;
  double limit = 0;
  int64_t shards = 1;  // of the program
};

struct Manifest {
  std::string schema;
  std::string name;
  Source source;
  ModelSizes model;
  DType dtype = DType::f32;
  int64_t max_seq = 1;
  int64_t batch = 1;
  std::string weights;  // `copy`, `link`, `reference` or `none`
  std::optional<std::string> tokenizer;
  bool has_chat_template = false;
  std::vector<int64_t> stop_tokens;
  std::map<std::string, std::string> toolchain;
  std::vector<ProgramRecord> programs;
  std::vector<Check> checks;
  std::map<std::string, File, std::less<>> files;
  std::map<std::string, std::string> weights_headers;
  std::map<std::string, File> referenced;
  std::optional<Quantized> quantized;
  std::map<std::string, Cut> cuts;  // by the name under which a constant is bound
  // Key paths that a newer minor version of the format has and this reader ignores.
  std::vector<std::string> ignored;

  // nullptr where it is not listed.
  const File* file(std::string_view name) const;
  // Names of the entries, each once, in the order of the programs.
  std::vector<std::string> entries() const;
};

// A manifest from its bytes; `where` is what errors name. Throws Error: kCompatibility where
// another major version of the format wrote it, else kManifest with the key path.
Manifest parse_manifest(std::string_view text, const std::string& where);

// The manifest of a bundle's folder. Throws as `parse_manifest`, and where there is none.
Manifest read_manifest(const std::filesystem::path& folder);

// `generate-32.vectors.safetensors` for `generate<32>`.
std::string vectors_name(const std::string& entry);

// The factor and the dimension of a size: 1 and `S` of `S`, 2 and `Rows` of `2*Rows`.
std::pair<int64_t, std::string> parts(const std::string& size);

// The shape in a call where dimensions have these sizes.
std::vector<int64_t> resolve(const std::vector<Size>& shape, const Sizes& sizes);

std::string show(const std::vector<Size>& shape);

}  // namespace llama_runtime
