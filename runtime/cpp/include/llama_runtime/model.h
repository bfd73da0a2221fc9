// A loaded bundle: entries and sessions over one copy of the weights.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "llama_runtime/bundle.h"
#include "llama_runtime/program.h"
#include "llama_runtime/tokenizer.h"

namespace llama_runtime {

struct LoadOptions {
  int threads = 0;           // of all programs of the process; 0 leaves torch's number
  bool allow_native = true;  // false refuses compiled programs (aoti)
  // `aoti` or `onnx`; empty takes for each entry the first of these that fits this machine.
  std::string format;
  std::string device = "cpu";  // or `cuda`, or one such as `cuda:1`
  bool cuda_graphs = true;     // there, replays captured steps instead of launching each anew
  std::filesystem::path weights_dir;  // the checkpoint's folder, for a bundle without weights
};

// Safe for use from several threads. Entries keep the weights alive, not the model.
class Model {
 public:
  // Opens a bundle. Programs are loaded when they are first asked for; their digests are checked
  // then. Throws Error as `open_bundle` and `map_weights`.
  explicit Model(const std::filesystem::path& folder, const LoadOptions& options = {});

  const Manifest& manifest() const { return shared_->bundle.manifest; }
  const std::filesystem::path& folder() const { return shared_->bundle.folder; }

  // The entry of that name; `generate` is enough where there is one `generate<N>`.
  // Throws Error: kInput where the bundle has no such entry or several; kCompatibility where none
  // of its programs fits this machine; kIntegrity where its file is damaged.
  std::shared_ptr<Entry> entry(const std::string& name);

  // Whether a program is of a format that the options allow and fits this machine.
  bool runs(const ProgramRecord& program) const;

  // One program of the manifest, whatever call it gets. Throws as `entry`.
  std::shared_ptr<Entry> open(const ProgramRecord& program);

  // Throws Error: kTokenizer where there is none or it is not of a family that is implemented;
  // kIntegrity where its file is damaged.
  const Tokenizer& tokenizer();

 private:
  // What entries keep alive to load their variants.
  struct Shared {
    Bundle bundle;
    std::map<std::string, Tensor> weights;
    int threads = 0;
    int cuda_device = -1;
    bool cuda_graphs = true;
  };

  static std::shared_ptr<LoadedProgram> load(const Shared& shared, const ProgramRecord& program);
  const ProgramRecord& choose(const std::string& name) const;
  void check(const ProgramRecord& program) const;

  LoadOptions options_;
  std::shared_ptr<const Shared> shared_;
  std::map<std::string, std::shared_ptr<Entry>> entries_;
  std::optional<Tokenizer> tokenizer_;
  std::mutex mutex_;
};

}  // namespace llama_runtime
