// ONNX programs in ONNX Runtime, where this library was built with it.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "llama_runtime/manifest.h"
#include "loaded_program.h"

namespace llama_runtime {

struct OnnxLoading {
  const ProgramRecord& program;
  std::filesystem::path path;  // of a file whose digest was checked
  // Weights that are not in the file beside the program, to be given to it; empty where all are.
  std::map<std::string, Tensor> given;
  int threads = 0;  // 0: one for each core
};

// Throws Error: kIntegrity where ONNX Runtime refuses the file, or its inputs and outputs are not
// the manifest's; kCompatibility where this library was built without ONNX Runtime.
std::shared_ptr<LoadedProgram> load_onnx(const OnnxLoading& loading);

// The release of the ONNX Runtime that is linked, such as `1.23.2`; nullopt where none is.
std::optional<std::string> onnxruntime_version();

}  // namespace llama_runtime
