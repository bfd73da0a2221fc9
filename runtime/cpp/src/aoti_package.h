// A loaded AOTInductor package, in ATen's terms.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "llama_runtime/tensor.h"

namespace torch::inductor {
class AOTIModelPackageLoader;
}

namespace llama_runtime {

class AotiPackage {
 public:
  // As `load_aoti`; `device` is the number of a CUDA device, or -1.
  AotiPackage(const std::filesystem::path& path, const std::map<std::string, Tensor>& constants,
              int device);
  ~AotiPackage();

  // One call at a time. `stream` is that of CUDA, or nullptr.
  std::vector<at::Tensor> run(std::vector<at::Tensor>&& arguments, void* stream = nullptr);

 private:
  std::map<std::string, Tensor> constants_;  // native code holds bare pointers into them
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> loader_;
};

}  // namespace llama_runtime
