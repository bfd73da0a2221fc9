// What stands for CUDA in a build without it; nothing but the first function is reached there.
#include "cuda.h"
#include "llama_runtime/error.h"

namespace llama_runtime {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::kCompatibility, "this runtime was built with a torch without CUDA",
              "device");
}

}  // namespace

std::optional<std::string> cuda_capability(int) {
  return std::nullopt;
}

Tensor to_cuda(const Tensor&, int) {
  refuse();
}

Tensor cuda_zeros(DType, std::vector<int64_t>, int) {
  refuse();
}

std::shared_ptr<LoadedProgram> load_cuda(const std::filesystem::path&, const ProgramRecord&,
                                         const std::map<std::string, Tensor>&, int, bool) {
  refuse();
}

}  // namespace llama_runtime
