#include "llama_runtime/model.h"

#include <set>

#include "aoti.h"
#include "compat.h"
#include "cuda.h"
#include "onnx.h"
#include "text.h"

namespace llama_runtime {
namespace {

template <typename Names>
std::string listed(const Names& names, const char* separator = ", ") {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : separator) + name;
  return text;
}

// Whether a variant keeps the same states as the program, so that calls may alternate.
bool is_alike(const ProgramRecord& variant, const ProgramRecord& program) {
  return variant.entry == program.entry && variant.format == program.format &&
         variant.shards == program.shards && variant.dtype == program.dtype &&
         variant.target.machine == program.target.machine &&
         variant.target.isa == program.target.isa &&
         variant.target.cpu_flags == program.target.cpu_flags;
}

std::vector<const ProgramRecord*> of_entry(const Manifest& manifest, const std::string& name) {
  std::vector<const ProgramRecord*> exact, generic;
  for (const ProgramRecord& program : manifest.programs) {
    if (!program.variant.empty()) continue;
    if (program.entry == name) exact.push_back(&program);
    if (program.entry.starts_with(name + "<")) generic.push_back(&program);
  }
  return exact.empty() ? generic : exact;
}

// The number of the CUDA device, or -1 for the CPU.
int checked_device(const std::string& device) {
  if (device == "cpu") return -1;
  const bool is_numbered = device.starts_with("cuda:") && device.size() == 6;
  if (device != "cuda" && !(is_numbered && device[5] >= '0' && device[5] <= '9')) {
    throw Error(ErrorCode::kInput, "expected cpu, cuda or one such as cuda:1, got " + shown(device),
                "device");
  }
  const int number = is_numbered ? device[5] - '0' : 0;
  if (cuda_capability(number)) return number;
  throw Error(ErrorCode::kCompatibility,
              "there is no such device, or this runtime was built without CUDA", device,
              "use --device cpu");
}

}  // namespace

Model::Model(const std::filesystem::path& folder, const LoadOptions& options) : options_(options) {
  if (!options.format.empty() && options.format != "aoti" && options.format != "onnx") {
    throw Error(ErrorCode::kInput, "expected aoti or onnx, got " + shown(options.format), "format");
  }
  auto shared = std::make_shared<Shared>();
  shared->threads = options.threads;
  shared->cuda_device = checked_device(options.device);
  shared->cuda_graphs = options.cuda_graphs;
  shared->bundle = open_bundle(std::filesystem::absolute(folder));
  shared->weights = map_weights(shared->bundle, options.weights_dir);
  if (shared->cuda_device >= 0) {
    for (auto& [name, tensor] : shared->weights) tensor = to_cuda(tensor, shared->cuda_device);
  }
  shared_ = std::move(shared);
  if (options.threads > 0) set_num_threads(options.threads);
}

std::shared_ptr<Entry> Model::entry(const std::string& name) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Entry>& entry = entries_[name];
  if (entry) return entry;
  const ProgramRecord& program = choose(name);
  std::vector<Entry::Variant> variants;
  for (const ProgramRecord& other : manifest().programs) {
    if (other.variant.empty() || !is_alike(other, program)) continue;
    if (misfit(other, options_)) continue;
    variants.push_back({other.variant, [shared = shared_, other] { return load(*shared, other); }});
  }
  entry = std::make_shared<Entry>(program, load(*shared_, program), std::move(variants),
                                  shared_->cuda_device);
  return entry;
}

std::shared_ptr<Entry> Model::open(const ProgramRecord& program) {
  check(program);
  return std::make_shared<Entry>(program, load(*shared_, program), std::vector<Entry::Variant>{},
                                 shared_->cuda_device);
}

const Tokenizer& Model::tokenizer() {
  const std::lock_guard lock(mutex_);
  if (!tokenizer_) {
    if (!manifest().tokenizer) {
      throw Error(ErrorCode::kTokenizer, "the bundle has no tokenizer", folder().string());
    }
    check_digest(shared_->bundle, kTokenizerName);
    tokenizer_.emplace(Tokenizer::load(shared_->bundle.path(kTokenizerName)));
  }
  return *tokenizer_;
}

std::shared_ptr<LoadedProgram> Model::load(const Shared& shared, const ProgramRecord& program) {
  check_digest(shared.bundle, program.file);
  const std::filesystem::path path = shared.bundle.path(program.file);
  std::map<std::string, Tensor> constants;
  for (const std::string& name : program.constants) {
    const auto found = shared.weights.find(name);
    if (found == shared.weights.end()) {
      throw Error(ErrorCode::kIntegrity, "the weights lack " + shown(name), path.string());
    }
    constants.insert(*found);
  }
  if (shared.cuda_device >= 0) {
    return load_cuda(path, program, constants, shared.cuda_device, shared.cuda_graphs);
  }
  if (program.format != "onnx") return load_aoti(path, constants);
  // ONNX Runtime maps the file beside the program; weights that lie elsewhere it is given.
  if (shared.bundle.manifest.referenced.empty()) constants.clear();
  return load_onnx({program, path, std::move(constants), shared.threads});
}

bool Model::runs(const ProgramRecord& program) const {
  const bool is_wanted = options_.format.empty() || options_.format == program.format;
  return is_wanted && !misfit(program, options_);
}

void Model::check(const ProgramRecord& program) const {
  if (const auto reason = misfit(program, options_)) throw *reason;
}

const ProgramRecord& Model::choose(const std::string& name) const {
  const std::vector<const ProgramRecord*> programs = of_entry(manifest(), name);
  std::set<std::string> names, formats;
  for (const ProgramRecord* program : programs) {
    names.insert(program->entry);
    formats.insert(program->format);
  }
  const std::string where = folder().string();
  if (names.empty()) {
    throw Error(ErrorCode::kInput, "the bundle has no entry " + shown(name), where,
                "it has " + listed(manifest().entries()));
  }
  if (names.size() > 1) {
    throw Error(ErrorCode::kInput, "the bundle has several entries " + shown(name), where,
                "say which: " + listed(names));
  }
  std::vector<std::string> wanted{options_.format};
  if (options_.format.empty()) wanted = runnable_formats();
  const ProgramRecord* refused = nullptr;
  for (const std::string& format : wanted) {
    for (const ProgramRecord* program : programs) {
      if (program->format != format) continue;
      if (!misfit(*program, options_)) return *program;
      if (refused == nullptr) refused = program;
    }
  }
  if (refused == nullptr) {
    throw Error(ErrorCode::kCompatibility,
                shown(name) + " is not there in format " + listed(wanted, " or "), where,
                "it is there in " + listed(formats) + "; build it with --format " + wanted[0]);
  }
  throw *misfit(*refused, options_);
}

}  // namespace llama_runtime
