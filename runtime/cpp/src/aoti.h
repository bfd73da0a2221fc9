// AOTInductor packages: native code, with the bundle's weights as its constants.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "llama_runtime/tensor.h"

namespace llama_runtime {

// A loaded package. `run` trusts its caller; calls from several threads wait for each other.
class NativeProgram {
 public:
  // Loads a package whose digest was checked. The constants' memory is used in place. Waits while
  // another package is loaded anywhere in the process. Throws Error(kIntegrity): it is no package
  // that this torch can load, or binds other constants. Leaves no files behind.
  NativeProgram(const std::filesystem::path& path, const std::map<std::string, Tensor>& constants);
  ~NativeProgram();
  NativeProgram(const NativeProgram&) = delete;
  NativeProgram& operator=(const NativeProgram&) = delete;

  // Arguments in the order of the signature: inputs, then states, which are written in place.
  std::vector<Tensor> run(const std::vector<Tensor>& arguments);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Threads of every program of the process.
void set_num_threads(int count);

// The minor version of the torch that this library was built with, such as `2.13`.
std::string torch_minor();

}  // namespace llama_runtime
