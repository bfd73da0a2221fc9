#include "llama_runtime/model.h"

#include <set>

#include "aoti.h"
#include "compat.h"
#include "text.h"

namespace llama_runtime {
namespace {

template <typename Names>
std::string listed(const Names& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

// Whether a variant keeps the same states as the program, so that calls may alternate.
bool is_alike(const ProgramRecord& variant, const ProgramRecord& program) {
  return variant.entry == program.entry && variant.format == program.format &&
         variant.dtype == program.dtype && variant.target.machine == program.target.machine &&
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

}  // namespace

Model::Model(const std::filesystem::path& folder, const LoadOptions& options) : options_(options) {
  auto shared = std::make_shared<Shared>();
  shared->bundle = open_bundle(std::filesystem::absolute(folder));
  shared->weights = map_weights(shared->bundle, options.weights_dir);
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
    if (misfit(other, options_.allow_native)) continue;
    variants.push_back({other.variant, [shared = shared_, other] { return load(*shared, other); }});
  }
  entry = std::make_shared<Entry>(program, load(*shared_, program), std::move(variants));
  return entry;
}

std::shared_ptr<Entry> Model::open(const ProgramRecord& program) {
  check(program);
  return std::make_shared<Entry>(program, load(*shared_, program), std::vector<Entry::Variant>{});
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

std::shared_ptr<NativeProgram> Model::load(const Shared& shared, const ProgramRecord& program) {
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
  return std::make_shared<NativeProgram>(path, constants);
}

void Model::check(const ProgramRecord& program) const {
  if (const auto reason = misfit(program, options_.allow_native)) throw *reason;
}

const ProgramRecord& Model::choose(const std::string& name) const {
  const std::vector<const ProgramRecord*> programs = of_entry(manifest(), name);
  std::set<std::string> names, formats;
  const ProgramRecord* chosen = nullptr;
  for (const ProgramRecord* program : programs) {
    names.insert(program->entry);
    formats.insert(program->format);
    if (program->format != "aoti") continue;
    const bool is_better = chosen == nullptr || (misfit(*chosen, options_.allow_native) &&
                                                 !misfit(*program, options_.allow_native));
    if (is_better) chosen = program;
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
  if (chosen == nullptr) {
    throw Error(ErrorCode::kCompatibility, shown(name) + " is not there in format aoti", where,
                "it is there in " + listed(formats) + "; build it with --format aoti");
  }
  check(*chosen);
  return *chosen;
}

}  // namespace llama_runtime
