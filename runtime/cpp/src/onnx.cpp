#include "onnx.h"

#include <onnxruntime_cxx_api.h>

#include <mutex>

#include "llama_runtime/error.h"

namespace llama_runtime {
namespace {

constexpr std::pair<DType, ONNXTensorElementDataType> kTypes[] = {
    {DType::f64, ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE},
    {DType::f32, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
    {DType::f16, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16},
    {DType::bf16, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16},
    {DType::f8e4m3, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN},
    {DType::f8e5m2, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E5M2},
    {DType::i64, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},
    {DType::i32, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
    {DType::i16, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16},
    {DType::i8, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8},
    {DType::u8, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},
    {DType::boolean, ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL},
};

ONNXTensorElementDataType onnx_type(DType dtype) {
  for (const auto& [own, type] : kTypes) {
    if (own == dtype) return type;
  }
  return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
}

// One for the process, which ONNX Runtime wants to outlive every session; it says errors only.
const Ort::Env& environment() {
  static const Ort::Env env(ORT_LOGGING_LEVEL_ERROR, "llama_runtime");
  return env;
}

const Ort::MemoryInfo& host() {
  static const auto info = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  return info;
}

// The same memory, which must outlive the result.
Ort::Value to_onnx(const Tensor& tensor) {
  static char nothing = 0;
  void* data = tensor.data ? tensor.data.get() : &nothing;
  return Ort::Value::CreateTensor(host(), data, static_cast<size_t>(tensor.nbytes()),
                                  tensor.shape.data(), tensor.shape.size(),
                                  onnx_type(tensor.dtype));
}

Tensor from_onnx(Ort::Value value) {
  const auto type = value.GetTensorTypeAndShapeInfo();
  Tensor tensor{DType::f32, type.GetShape(), nullptr};
  for (const auto& [own, other] : kTypes) {
    if (other == type.GetElementType()) tensor.dtype = own;
  }
  auto owner = std::make_shared<Ort::Value>(std::move(value));
  tensor.data = std::shared_ptr<void>(owner, owner->GetTensorMutableRawData());
  return tensor;
}

// An input or output as the graph or the manifest declares it.
struct Port {
  std::string name;
  ONNXTensorElementDataType type;
  std::vector<Size> shape;

  bool operator==(const Port&) const = default;
};

Port found_port(const std::string& name, const Ort::TypeInfo& info) {
  if (info.GetONNXType() != ONNX_TYPE_TENSOR) {
    return {name, ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED, {}};
  }
  const auto tensor = info.GetTensorTypeAndShapeInfo();
  const std::vector<int64_t> sizes = tensor.GetShape();
  std::vector<const char*> names(sizes.size());
  tensor.GetSymbolicDimensions(names.data(), names.size());
  Port port{name, tensor.GetElementType(), {}};
  for (size_t i = 0; i < sizes.size(); ++i) {
    port.shape.push_back(sizes[i] < 0 ? Size(std::string(names[i])) : Size(sizes[i]));
  }
  return port;
}

std::vector<Port> found_ports(const Ort::Session& session) {
  const Ort::AllocatorWithDefaultOptions allocator;
  std::vector<Port> ports;
  for (size_t i = 0; i < session.GetInputCount(); ++i) {
    const auto name = session.GetInputNameAllocated(i, allocator);
    ports.push_back(found_port(name.get(), session.GetInputTypeInfo(i)));
  }
  for (size_t i = 0; i < session.GetOutputCount(); ++i) {
    const auto name = session.GetOutputNameAllocated(i, allocator);
    ports.push_back(found_port(name.get(), session.GetOutputTypeInfo(i)));
  }
  return ports;
}

std::string state_name(const TensorSpec& state) {
  return "state." + state.name;
}

std::vector<Port> declared_ports(const Signature& signature) {
  std::vector<Port> ports;
  const auto declare = [&ports](const std::string& name, const TensorSpec& spec) {
    ports.push_back({name, onnx_type(spec.dtype), spec.shape});
  };
  for (const TensorSpec& spec : signature.inputs) declare(spec.name, spec);
  for (const TensorSpec& spec : signature.states) declare(state_name(spec), spec);
  for (const TensorSpec& spec : signature.outputs) declare(spec.name, spec);
  for (const TensorSpec& spec : signature.states) declare(state_name(spec) + ".next", spec);
  return ports;
}

// ONNX Runtime believes what a buffer is bound as, so the model must say the same.
void check_ports(const Ort::Session& session, const OnnxLoading& loading) {
  const std::vector<Port> found = found_ports(session);
  const std::vector<Port> expected = declared_ports(loading.program.signature);
  if (found == expected) return;
  std::string odd = "their dtypes or shapes differ";
  for (size_t i = std::min(found.size(), expected.size()); i-- > 0;) {
    if (found[i].name != expected[i].name) odd = found[i].name;
  }
  throw Error(ErrorCode::kIntegrity, "its inputs and outputs are not the manifest's: " + odd,
              loading.path.string());
}

Ort::SessionOptions options_for(const OnnxLoading& loading, std::vector<Ort::Value>& values) {
  Ort::SessionOptions options;
  options.SetLogSeverityLevel(ORT_LOGGING_LEVEL_ERROR);
  if (loading.threads > 0) options.SetIntraOpNumThreads(loading.threads);
  std::vector<std::string> names;
  for (const auto& [name, tensor] : loading.given) {
    names.push_back(name);
    values.push_back(to_onnx(tensor));
  }
  if (!names.empty()) options.AddExternalInitializers(names, values);
  return options;
}

class OnnxProgram : public LoadedProgram {
 public:
  explicit OnnxProgram(const OnnxLoading& loading)
      : signature_(loading.program.signature),
        given_(loading.given),
        session_(environment(), loading.path.c_str(), options_for(loading, given_values_)),
        binding_(session_) {
    check_ports(session_, loading);
  }

  std::vector<Tensor> run(const std::vector<Tensor>& arguments) override {
    const std::lock_guard lock(running_);
    const size_t num_inputs = signature_.inputs.size();
    for (size_t i = 0; i < num_inputs; ++i) {
      binding_.BindInput(signature_.inputs[i].name.c_str(), to_onnx(arguments[i]));
    }
    for (const TensorSpec& spec : signature_.outputs) {
      binding_.BindOutput(spec.name.c_str(), host());  // new memory each time
    }
    for (size_t i = 0; i < signature_.states.size(); ++i) {
      // Input and output share one buffer, so that the graph's scatter happens in place.
      const std::string name = state_name(signature_.states[i]);
      const Ort::Value value = to_onnx(arguments[num_inputs + i]);
      binding_.BindInput(name.c_str(), value);
      binding_.BindOutput((name + ".next").c_str(), value);
    }
    session_.Run(Ort::RunOptions{}, binding_);
    std::vector<Ort::Value> values = binding_.GetOutputValues();
    binding_.ClearBoundInputs();
    binding_.ClearBoundOutputs();
    std::vector<Tensor> results;
    for (size_t i = 0; i < signature_.outputs.size(); ++i) {
      results.push_back(from_onnx(std::move(values[i])));
    }
    return results;
  }

 private:
  Signature signature_;
  std::map<std::string, Tensor> given_;  // the session uses their memory
  std::vector<Ort::Value> given_values_;
  Ort::Session session_;
  Ort::IoBinding binding_;
  std::mutex running_;
};

}  // namespace

std::shared_ptr<LoadedProgram> load_onnx(const OnnxLoading& loading) {
  try {
    return std::make_shared<OnnxProgram>(loading);
  } catch (const Ort::Exception& cause) {
    const std::string reason = cause.what();
    throw Error(ErrorCode::kIntegrity,
                "ONNX Runtime refuses it: " + reason.substr(0, reason.find('\n')),
                loading.path.string(), "build the bundle again");
  }
}

std::optional<std::string> onnxruntime_version() {
  return OrtGetApiBase()->GetVersionString();
}

}  // namespace llama_runtime
