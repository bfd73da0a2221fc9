#include "cuda.h"

#include <ATen/Functions.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <list>
#include <mutex>

#include "aoti_package.h"
#include "torch_tensor.h"

namespace llama_runtime {
namespace {

constexpr size_t kMaxStateSets = 4;  // whose graphs are kept; the oldest goes
constexpr int kWarmUps = 2;          // runs in which libraries allocate and choose before a capture

at::Device cuda_device(int device) {
  return {at::kCUDA, static_cast<c10::DeviceIndex>(device)};
}

// A captured call: it reads its inputs and leaves its results where they were at the capture.
struct Captured {
  std::vector<void*> states;  // the addresses that it was captured with
  std::vector<at::Tensor> inputs, outputs;
  at::cuda::CUDAGraph graph;
};

bool is_fixed(const Signature& signature) {
  for (const TensorSpec& spec : signature.inputs) {
    for (const Size& size : spec.shape) {
      if (std::holds_alternative<std::string>(size)) return false;
    }
  }
  return true;
}

class CudaProgram : public LoadedProgram {
 public:
  CudaProgram(const std::filesystem::path& path, const ProgramRecord& program,
              const std::map<std::string, Tensor>& constants, int device, bool uses_graphs)
      : device_(cuda_device(device)),
        num_inputs_(program.signature.inputs.size()),
        is_captured_(uses_graphs && is_fixed(program.signature)),
        package_(path, constants, device) {}

  std::vector<Tensor> run(const std::vector<Tensor>& arguments) override {
    const c10::InferenceMode mode;
    const c10::cuda::CUDAGuard device(device_);
    const std::lock_guard lock(running_);
    std::vector<at::Tensor> flat;
    for (const Tensor& argument : arguments) flat.push_back(to_aten(argument).to(device_));
    std::vector<at::Tensor> outputs;
    if (Captured* captured = is_captured_ ? capture_of(flat) : nullptr) {
      for (size_t i = 0; i < num_inputs_; ++i) captured->inputs[i].copy_(flat[i]);
      captured->graph.replay();
      outputs = captured->outputs;
    } else {
      outputs = launch(flat);
    }
    std::vector<Tensor> results;  // the copies wait for what runs on the stream
    for (const at::Tensor& output : outputs) results.push_back(from_aten(output.to(at::kCPU)));
    return results;
  }

 private:
  std::vector<at::Tensor> launch(std::vector<at::Tensor> arguments) {
    return package_.run(std::move(arguments), c10::cuda::getCurrentCUDAStream().stream());
  }

  // The graph for these states, captured now if it is the first such call; nullptr where the
  // program cannot be captured. A step may be run again: it writes the same to the same places.
  Captured* capture_of(const std::vector<at::Tensor>& arguments) {
    std::vector<void*> states;
    for (size_t i = num_inputs_; i < arguments.size(); ++i) {
      states.push_back(arguments[i].data_ptr());
    }
    for (const auto& captured : graphs_) {
      if (captured->states == states) return captured.get();
    }
    try {
      graphs_.push_back(capture(arguments, std::move(states)));
    } catch (const c10::Error&) {
      is_captured_ = false;
      return nullptr;
    }
    if (graphs_.size() > kMaxStateSets) graphs_.pop_front();
    return graphs_.back().get();
  }

  std::unique_ptr<Captured> capture(std::vector<at::Tensor> arguments, std::vector<void*> states) {
    auto captured = std::make_unique<Captured>();
    captured->states = std::move(states);
    for (size_t i = 0; i < num_inputs_; ++i) {
      captured->inputs.push_back(arguments[i].clone());
      arguments[i] = captured->inputs.back();
    }
    c10::cuda::getCurrentCUDAStream().synchronize();
    const auto stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device_.index());
    const c10::cuda::CUDAStreamGuard guard(stream);
    for (int i = 0; i < kWarmUps; ++i) launch(arguments);
    stream.synchronize();
    captured->graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    captured->outputs = launch(arguments);
    captured->graph.capture_end();
    return captured;
  }

  at::Device device_;
  size_t num_inputs_;
  bool is_captured_;
  AotiPackage package_;
  std::list<std::unique_ptr<Captured>> graphs_;
  std::mutex running_;
};

}  // namespace

std::optional<std::string> cuda_capability(int device) {
  if (device >= c10::cuda::device_count()) return std::nullopt;
  int major = 0, minor = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return std::to_string(major) + "." + std::to_string(minor);
}

Tensor to_cuda(const Tensor& tensor, int device) {
  Tensor copy = from_aten(to_aten(tensor).to(cuda_device(device)));
  copy.is_on_device = true;
  return copy;
}

Tensor cuda_zeros(DType dtype, std::vector<int64_t> shape, int device) {
  return to_cuda(Tensor::zeros(dtype, std::move(shape)), device);
}

std::shared_ptr<LoadedProgram> load_cuda(const std::filesystem::path& path,
                                         const ProgramRecord& program,
                                         const std::map<std::string, Tensor>& constants, int device,
                                         bool uses_graphs) {
  return std::make_shared<CudaProgram>(path, program, constants, device, uses_graphs);
}

}  // namespace llama_runtime
