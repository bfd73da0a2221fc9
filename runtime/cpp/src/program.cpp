#include "llama_runtime/program.h"

#include <algorithm>
#include <mutex>

#include "call.h"
#include "llama_runtime/error.h"
#include "loaded_program.h"

namespace llama_runtime {

struct Entry::Impl {
  struct Loaded {
    Variant variant;
    std::shared_ptr<LoadedProgram> program;  // once it was needed
  };
  std::shared_ptr<LoadedProgram> program;
  std::vector<Loaded> variants;  // those that fix most come first
  std::mutex loading;
};

Entry::Entry(ProgramRecord record, std::shared_ptr<LoadedProgram> program,
             std::vector<Variant> variants, int cuda_device)
    : record_(std::move(record)), cuda_device_(cuda_device), impl_(std::make_unique<Impl>()) {
  impl_->program = std::move(program);
  std::stable_sort(variants.begin(), variants.end(), [](const Variant& a, const Variant& b) {
    return a.sizes.size() > b.sizes.size();
  });
  for (Variant& variant : variants) impl_->variants.push_back({std::move(variant), nullptr});
}

Entry::~Entry() = default;

LoadedProgram& Entry::fitting(const Sizes& sizes) {
  const std::lock_guard lock(impl_->loading);
  for (Impl::Loaded& loaded : impl_->variants) {
    const Sizes& fixed = loaded.variant.sizes;
    const bool fits = std::all_of(fixed.begin(), fixed.end(), [&](const auto& size) {
      const auto found = sizes.find(size.first);
      return found != sizes.end() && found->second == size.second;
    });
    if (!fits) continue;
    if (!loaded.program) loaded.program = loaded.variant.load();
    return *loaded.program;
  }
  return *impl_->program;
}

std::vector<Tensor> Entry::run(States* states, const std::map<std::string, Tensor>& inputs) {
  const Sizes sizes = check_call(signature(), record_.entry, states, inputs);
  std::vector<Tensor> arguments;
  for (const TensorSpec& spec : signature().inputs) arguments.push_back(inputs.at(spec.name));
  if (states) {
    arguments.insert(arguments.end(), states->tensors().begin(), states->tensors().end());
  }
  LoadedProgram& program = fitting(sizes);
  std::vector<Tensor> results;
  try {
    results = program.run(arguments);
  } catch (const std::exception& cause) {
    const std::string reason = cause.what();
    throw Error(ErrorCode::kIntegrity,
                "`" + record_.entry + "` failed: " + reason.substr(0, reason.find('\n')),
                record_.file, "build the bundle again");
  }
  check_results(record_, results, sizes);
  return results;
}

}  // namespace llama_runtime
