// Programs on a CUDA device, where torch has CUDA.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "llama_runtime/manifest.h"
#include "loaded_program.h"

namespace llama_runtime {

// The compute capability of a device, such as `9.0`; nullopt where there is no such device, or this
// library was built without CUDA.
std::optional<std::string> cuda_capability(int device);

// A copy in the memory of a device, and new memory there, all zero.
Tensor to_cuda(const Tensor& tensor, int device);
Tensor cuda_zeros(DType dtype, std::vector<int64_t> shape, int device);

// Loads a package as `load_aoti`; constants and states lie on the device, inputs and results do
// not. With `uses_graphs` a call without dynamic dimensions is captured once for each set of states
// and then replayed; what cannot be captured is launched step by step.
std::shared_ptr<LoadedProgram> load_cuda(const std::filesystem::path& path,
                                         const ProgramRecord& program,
                                         const std::map<std::string, Tensor>& constants, int device,
                                         bool uses_graphs);

}  // namespace llama_runtime
