// What stands for ONNX Runtime in a build without it.
#include "llama_runtime/error.h"
#include "onnx.h"

namespace llama_runtime {

std::shared_ptr<LoadedProgram> load_onnx(const OnnxLoading& loading) {
  throw Error(ErrorCode::kCompatibility, "this runtime was built without ONNX Runtime",
              loading.path.string(), "build it with -DLLAMA_RUNTIME_ONNX=ON");
}

std::optional<std::string> onnxruntime_version() {
  return std::nullopt;
}

}  // namespace llama_runtime
