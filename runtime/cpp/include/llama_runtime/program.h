// An entry as something that can be called.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "llama_runtime/manifest.h"
#include "llama_runtime/state.h"
#include "llama_runtime/tensor.h"

namespace llama_runtime {

class LoadedProgram;

// One entry of a loaded bundle; a call is run by the most specific program that fits it. Calls
// from several threads are safe and wait for each other, as long as each has its own states.
class Entry {
 public:
  using Loader = std::function<std::shared_ptr<LoadedProgram>()>;
  struct Variant {
    Sizes sizes;
    Loader load;  // called when a call first fits
  };

  Entry(ProgramRecord record, std::shared_ptr<LoadedProgram> program, std::vector<Variant> variants,
        int cuda_device = -1);
  ~Entry();

  const ProgramRecord& record() const { return record_; }
  const Signature& signature() const { return record_.signature; }

  // New states of this entry where its programs run. Throws as `States`.
  States new_states(const Sizes& sizes = {}) const {
    return States(record_.signature, sizes, cuda_device_);
  }

  // Runs one call. `states` may be nullptr where the entry has none; they are written in place.
  // Every input of the signature is given by name. Results are the caller's.
  // Throws Error(kInput): an input or the states are not what the signature declares, or a value
  // is out of its bounds; nothing has run then. Throws Error(kIntegrity): the program failed or
  // gave something else than declared; the states may hold a part of the step.
  std::vector<Tensor> run(States* states, const std::map<std::string, Tensor>& inputs);

 private:
  struct Impl;
  LoadedProgram& fitting(const Sizes& sizes);

  ProgramRecord record_;
  int cuda_device_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace llama_runtime
