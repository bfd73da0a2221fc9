#include "llama_runtime/manifest.h"

#include <algorithm>
#include <charconv>
#include <set>

#include "files.h"
#include "manifest_parts.h"
#include "text.h"

namespace llama_runtime {
namespace {

constexpr int64_t kMaxManifestBytes = 16 << 20;
constexpr int kMajor = 1, kMinor = 0;
constexpr const char* kHint = "point at the folder that `llama-export build` wrote";

// `major` and `minor` of a version such as `1.0`; nullopt where it is none.
std::optional<std::pair<int, int>> version_numbers(const std::string& version) {
  const size_t dot = version.find('.');
  if (dot == version.npos) return std::nullopt;
  std::pair<int, int> numbers;
  const auto read = [](const std::string& digits, int& number) {
    if (digits.empty() || digits.size() > 6 || (digits.size() > 1 && digits[0] == '0'))
      return false;
    const char* end = digits.data() + digits.size();
    return digits.find_first_not_of("0123456789") == digits.npos &&
           std::from_chars(digits.data(), end, number).ptr == end;
  };
  if (!read(version.substr(0, dot), numbers.first)) return std::nullopt;
  if (!read(version.substr(dot + 1), numbers.second)) return std::nullopt;
  return numbers;
}

bool is_newer(const JsonObject& object, const std::string& where) {
  const Json* schema = find(object, "schema");
  const auto* text = schema ? std::get_if<std::string>(&schema->value) : nullptr;
  const auto numbers = text ? version_numbers(*text) : std::nullopt;
  if (!numbers) {
    const std::string got = text ? shown(*text) : schema ? json_type(*schema) : "null";
    throw Error(ErrorCode::kManifest, "expected a version such as `1.0`, got " + got,
                where + "#schema");
  }
  if (numbers->first != kMajor) {
    throw Error(ErrorCode::kCompatibility, "bundle format " + *text + " is not 1.x",
                where + "#schema",
                "use the version of llama-export that wrote it, or build it again");
  }
  return numbers->second > kMinor;
}

File read_file_record(const Node& node) {
  node.keys({"bytes", "sha256", "blocks"});
  File file;
  file.bytes = node.field("bytes").at_least(0);
  file.sha256 = node.field("sha256").text(is_sha256, "64 hexadecimal digits");
  if (const auto blocks = node.optional("blocks")) {
    for (const Node& item : blocks->items()) {
      file.blocks.push_back(item.text(is_sha256, "64 hexadecimal digits"));
    }
  }
  const int64_t whole = file.bytes / kBlockBytes, rest = file.bytes % kBlockBytes;
  const int64_t count = file.bytes > kBlockBytes ? whole + (rest != 0) : 0;
  if (!file.blocks.empty() && static_cast<int64_t>(file.blocks.size()) != count) {
    node.fail("expected " + std::to_string(count) + " block digests for " +
              with_commas(file.bytes) + " bytes, got " + std::to_string(file.blocks.size()));
  }
  return file;
}

std::map<std::string, File, std::less<>> read_files(const Node& node) {
  std::map<std::string, File, std::less<>> files;
  for (const auto& [name, item] : node.members()) {
    item.check_key(name, is_file_name, "a plain file name");
    files.emplace(name, read_file_record(item));
  }
  return files;
}

std::map<std::string, std::string> read_texts(const Node& node) {
  std::map<std::string, std::string> texts;
  for (const auto& [name, item] : node.members()) texts[name] = item.text();
  return texts;
}

std::vector<std::string> read_names(const Node& node) {
  std::vector<std::string> names;
  for (const Node& item : node.items()) names.push_back(item.text());
  return names;
}

Source read_source(const Node& node) {
  node.keys({"kind", "name", "revision", "license"});
  Source source;
  source.kind = node.field("kind").text();
  source.name = node.field("name").text();
  if (const auto text = node.optional("revision")) source.revision = text->text_or_null();
  if (const auto text = node.optional("license")) source.license = text->text_or_null();
  return source;
}

ModelSizes read_model(const Node& node) {
  node.keys({"vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
             "num_kv_heads", "head_dim", "rms_norm_eps", "rope", "tie_word_embeddings",
             "attention_bias", "mlp_bias", "num_parameters"});
  ModelSizes model;
  model.vocab_size = node.field("vocab_size").at_least(1);
  model.hidden_size = node.field("hidden_size").at_least(1);
  model.intermediate_size = node.field("intermediate_size").at_least(1);
  model.num_layers = node.field("num_layers").at_least(1);
  model.num_heads = node.field("num_heads").at_least(1);
  model.num_kv_heads = node.field("num_kv_heads").at_least(1);
  model.head_dim = node.field("head_dim").at_least(1);
  model.rms_norm_eps = node.field("rms_norm_eps").number();
  model.rope = node.field("rope").text();
  model.tie_word_embeddings = node.field("tie_word_embeddings").boolean();
  model.attention_bias = node.field("attention_bias").boolean();
  model.mlp_bias = node.field("mlp_bias").boolean();
  model.num_parameters = node.field("num_parameters").at_least(1);
  return model;
}

Target read_target(const Node& node) {
  node.keys({"device", "machine", "isa", "cpu_flags", "capability"});
  Target target;
  target.device = node.field("device").one_of({"cpu", "cuda"});
  if (const auto text = node.optional("machine")) target.machine = text->text_or_null();
  if (const auto text = node.optional("isa")) target.isa = text->text_or_null();
  if (const auto names = node.optional("cpu_flags")) target.cpu_flags = read_names(*names);
  if (const auto text = node.optional("capability")) target.capability = text->text_or_null();
  return target;
}

Sizes read_variant(const Node& node) {
  Sizes sizes;
  for (const auto& [name, item] : node.members()) {
    item.check_key(name, is_identifier, "an identifier");
    sizes[name] = item.at_least(1);
  }
  return sizes;
}

ProgramRecord read_program(const Node& node) {
  node.keys({"entry", "format", "file", "dtype", "target", "signature", "constants", "requires",
             "variant", "numerics", "shards"});
  ProgramRecord program;
  program.entry =
      node.field("entry").text(is_entry_name, "an entry such as `decode` or `generate<32>`");
  program.format = node.field("format").one_of({"pt2", "aoti", "onnx"});
  program.file = node.field("file").text(is_file_name, "a plain file name");
  program.dtype = node.field("dtype").dtype();
  program.target = read_target(node.field("target"));
  program.signature = read_signature(node.field("signature"));
  program.constants = read_names(node.field("constants"));
  program.requires_ = read_texts(node.field("requires"));
  if (const auto variant = node.optional("variant")) program.variant = read_variant(*variant);
  if (const auto text = node.optional("numerics"); text && !text->is_null()) {
    program.numerics = text->one_of({"exact", "fast"});
  }
  if (const auto shards = node.optional("shards")) program.shards = shards->at_least(1);
  std::set<std::string> dims;
  for (const Dim& dim : program.signature.dims) dims.insert(dim.name);
  for (const auto& [name, size] : program.variant) {
    if (dims.contains(name)) {
      node.fail("`" + program.entry + "` does not fix " + name + " = " + std::to_string(size) +
                " in its signature");
    }
  }
  return program;
}

Check read_check(const Node& node) {
  node.keys({"law", "entry", "format", "figure", "limit", "shards"});
  Check check;
  check.law = node.field("law").text();
  check.entry = node.field("entry").text();
  check.format = node.field("format").one_of({"", "pt2", "aoti", "onnx"});
  check.figure = node.field("figure").number();
  check.limit = node.field("limit").number();
  if (const auto shards = node.optional("shards")) check.shards = shards->at_least(1);
  return check;
}

Quantized read_quantized(const Node& node) {
  node.keys({"kind", "group_size"});
  Quantized quantized;
  quantized.kind = node.field("kind").one_of({"int8", "int4", "uint4"});
  if (const auto size = node.optional("group_size"); size && !size->is_null()) {
    quantized.group_size = size->at_least(1);
  }
  return quantized;
}

Cut read_cut(const Node& node) {
  node.keys({"tensor", "axis"});
  return {node.field("tensor").text(), node.field("axis").one_of({"rows", "columns"})};
}

void read_weights(const Node& node, Manifest& manifest) {
  for (const auto& [name, item] : node.field("weights_headers").members()) {
    item.check_key(name, is_file_name, "a plain file name");
    manifest.weights_headers[name] = item.text(is_sha256, "64 hexadecimal digits");
  }
  if (const auto referenced = node.optional("referenced")) {
    for (const auto& [name, file] : read_files(*referenced))
      manifest.referenced.emplace(name, file);
  }
  if (const auto quantized = node.optional("quantized"); quantized && !quantized->is_null()) {
    manifest.quantized = read_quantized(*quantized);
  }
  if (const auto cuts = node.optional("cuts")) {
    for (const auto& [name, item] : cuts->members()) manifest.cuts[name] = read_cut(item);
  }
}

Manifest read_all(const Node& node) {
  node.keys({"schema", "name", "source", "model", "dtype", "max_seq", "batch", "weights",
             "tokenizer", "has_chat_template", "stop_tokens", "toolchain", "programs", "checks",
             "files", "weights_headers", "referenced", "quantized", "cuts"});
  Manifest manifest;
  manifest.schema = node.field("schema").text();
  manifest.name = node.field("name").text();
  manifest.source = read_source(node.field("source"));
  manifest.model = read_model(node.field("model"));
  manifest.dtype = node.field("dtype").dtype();
  manifest.max_seq = node.field("max_seq").at_least(1);
  manifest.batch = node.field("batch").at_least(1);
  manifest.weights = node.field("weights").one_of({"copy", "link", "reference", "none"});
  if (const Node kind = node.field("tokenizer"); !kind.is_null()) {
    manifest.tokenizer = kind.one_of({"tokenizers"});
  }
  manifest.has_chat_template = node.field("has_chat_template").boolean();
  for (const Node& item : node.field("stop_tokens").items()) {
    manifest.stop_tokens.push_back(item.at_least(0));
  }
  manifest.toolchain = read_texts(node.field("toolchain"));
  for (const Node& item : node.field("programs").items()) {
    manifest.programs.push_back(read_program(item));
  }
  for (const Node& item : node.field("checks").items()) {
    manifest.checks.push_back(read_check(item));
  }
  manifest.files = read_files(node.field("files"));
  read_weights(node, manifest);
  check_files(node, manifest);
  check_weights(node, manifest);
  return manifest;
}

}  // namespace

std::string ProgramRecord::label() const {
  std::string fixed;
  for (const auto& [name, size] : variant) {
    fixed += (fixed.empty() ? ":" : ",") + name + "=" + std::to_string(size);
  }
  return entry + fixed;
}

const File* Manifest::file(std::string_view name) const {
  const auto found = files.find(name);
  return found == files.end() ? nullptr : &found->second;
}

std::vector<std::string> Manifest::entries() const {
  std::vector<std::string> names;
  std::set<std::string> seen;
  for (const ProgramRecord& program : programs) {
    if (seen.insert(program.entry).second) names.push_back(program.entry);
  }
  return names;
}

std::string vectors_name(const std::string& entry) {
  std::string stem = entry;
  std::replace(stem.begin(), stem.end(), '<', '-');
  if (stem.ends_with(">")) stem.pop_back();
  return stem + ".vectors.safetensors";
}

Manifest parse_manifest(std::string_view text, const std::string& where) {
  const Json json{parse_object(text, where, ErrorCode::kManifest)};
  std::vector<std::string> ignored;
  const bool newer = is_newer(std::get<JsonObject>(json.value), where);
  Manifest manifest = read_all(Node(json, "", where, newer ? &ignored : nullptr));
  manifest.ignored = std::move(ignored);
  return manifest;
}

Manifest read_manifest(const std::filesystem::path& folder) {
  namespace fs = std::filesystem;
  const fs::path path = folder / kManifestName;
  const std::string where = path.string();
  const auto refuse = [](const std::string& message, const std::string& place) {
    throw Error(ErrorCode::kManifest, message, place, kHint);
  };
  const Status status = file_status(path);
  if (status.error == ENOENT || status.error == ENOTDIR) {
    std::error_code ignored;
    const char* found = fs::is_directory(folder, ignored) ? "a folder without it"
                        : fs::exists(folder, ignored)     ? "a file"
                                                          : "no such folder";
    refuse(std::string("expected a `manifest.json`, found ") + found, folder.string());
  }
  if (status.error) refuse("cannot be read: " + os_text(status.error), where);
  if (!status.is_plain) refuse("expected a plain file", where);
  if (status.num_bytes > kMaxManifestBytes) {
    refuse("expected at most " + with_commas(kMaxManifestBytes) + " bytes, got " +
               with_commas(status.num_bytes),
           where);
  }
  if (leads_out(path)) {
    throw Error(ErrorCode::kManifest, "expected no link out of the bundle", where, kLinkHint);
  }
  return parse_manifest(read_bytes(path, ErrorCode::kManifest), where);
}

}  // namespace llama_runtime
