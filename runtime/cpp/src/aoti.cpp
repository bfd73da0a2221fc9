#include "aoti.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/headeronly/version.h>

#include <cstdlib>
#include <fstream>
#include <mutex>
#include <set>

#include "aoti_package.h"
#include "llama_runtime/error.h"
#include "text.h"
#include "torch_tensor.h"

namespace llama_runtime {
namespace {

namespace fs = std::filesystem;

constexpr std::pair<DType, at::ScalarType> kTypes[] = {
    {DType::f64, at::kDouble},
    {DType::f32, at::kFloat},
    {DType::f16, at::kHalf},
    {DType::bf16, at::kBFloat16},
    {DType::f8e4m3, at::kFloat8_e4m3fn},
    {DType::f8e5m2, at::kFloat8_e5m2},
    {DType::i64, at::kLong},
    {DType::i32, at::kInt},
    {DType::i16, at::kShort},
    {DType::i8, at::kChar},
    {DType::u8, at::kByte},
    {DType::boolean, at::kBool},
};

// The engine does not promise that two loads at once go well.
std::mutex& loading() {
  static std::mutex mutex;
  return mutex;
}

// A folder that is gone at the end of its scope, also after an exception.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    const char* parent = std::getenv("TMPDIR");
    path_ = std::string(parent && *parent ? parent : "/tmp") + "/llama-runtime-XXXXXX";
    if (mkdtemp(path_.data()) == nullptr) {
      throw Error(ErrorCode::kCompatibility, "no temporary folder can be made", path_,
                  "set TMPDIR to a folder that can be written");
    }
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Unpacks the archive, as torch's loader would, but to where it is certain to be removed.
void unpack(const fs::path& package, const fs::path& folder) {
  caffe2::serialize::PyTorchStreamReader reader(package.string());
  for (const std::string& name : reader.getAllRecords()) {
    const fs::path path = (folder / "archive" / name).lexically_normal();
    if (path.string().rfind((folder / "archive").string() + "/", 0) != 0) {
      throw Error(ErrorCode::kIntegrity, "its member " + shown(name) + " leads out of it",
                  package.string());
    }
    fs::create_directories(path.parent_path());
    const auto [data, num_bytes] = reader.getRecord(name);
    std::ofstream file(path, std::ios::binary);
    file.write(static_cast<const char*>(data.get()), static_cast<std::streamsize>(num_bytes));
    if (!file.flush()) {
      throw Error(ErrorCode::kCompatibility, "cannot be unpacked: a file cannot be written",
                  folder.string(), "free some space, or set TMPDIR to another folder");
    }
  }
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

void check_constants(const std::vector<std::string>& found,
                     const std::map<std::string, Tensor>& constants, const fs::path& path) {
  const std::set<std::string> names(found.begin(), found.end());
  for (const std::string& name : names) {
    if (!constants.contains(name)) {
      throw Error(ErrorCode::kIntegrity, "its constants are not the manifest's: " + shown(name),
                  path.string());
    }
  }
  for (const auto& [name, tensor] : constants) {
    if (!names.contains(name)) {
      throw Error(ErrorCode::kIntegrity, "its constants are not the manifest's: " + shown(name),
                  path.string());
    }
  }
}

}  // namespace

at::Tensor to_aten(const Tensor& tensor) {
  at::ScalarType type = at::kFloat;
  for (const auto& [dtype, candidate] : kTypes) {
    if (dtype == tensor.dtype) type = candidate;
  }
  if (tensor.data == nullptr) return at::empty(tensor.shape, type);
  const at::Device device = tensor.is_on_device ? at::kCUDA : at::kCPU;
  return at::from_blob(tensor.data.get(), tensor.shape, at::TensorOptions(type).device(device));
}

Tensor from_aten(const at::Tensor& tensor) {
  auto owner = std::make_shared<at::Tensor>(tensor.contiguous());
  Tensor result{DType::f32, owner->sizes().vec(), nullptr};
  for (const auto& [dtype, candidate] : kTypes) {
    if (candidate == owner->scalar_type()) result.dtype = dtype;
  }
  result.data = std::shared_ptr<void>(owner, owner->mutable_data_ptr());
  return result;
}

std::vector<float> to_floats(const Tensor& tensor) {
  const at::Tensor values = to_aten(tensor).to(at::kFloat).contiguous();
  const auto* data = values.const_data_ptr<float>();
  return {data, data + values.numel()};
}

std::vector<int64_t> to_integers(const Tensor& tensor) {
  const at::Tensor values = to_aten(tensor).to(at::kLong).contiguous();
  const auto* data = values.const_data_ptr<int64_t>();
  return {data, data + values.numel()};
}

void fill(const Tensor& tensor, double value) {
  to_aten(tensor).fill_(value);
}

AotiPackage::AotiPackage(const fs::path& path, const std::map<std::string, Tensor>& constants,
                         int device)
    : constants_(constants) {
  const std::lock_guard lock(loading());
  const TemporaryFolder folder;
  try {
    unpack(path, folder.path());
    // Once it is loaded the library no longer needs its file.
    loader_ = std::make_unique<torch::inductor::AOTIModelPackageLoader>(
        folder.path(), "model", false, 1, static_cast<c10::DeviceIndex>(device));
    check_constants(loader_->get_constant_fqns(), constants, path);
    std::unordered_map<std::string, at::Tensor> tensors;
    for (const auto& [name, tensor] : constants) tensors.emplace(name, to_aten(tensor));
    // The active buffer, every constant given, the memory ours.
    loader_->load_constants(tensors, false, true, true);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& cause) {
    throw Error(ErrorCode::kIntegrity, "cannot be loaded: " + first_line(cause.what()),
                path.string(), "build the bundle again on this machine");
  }
}

AotiPackage::~AotiPackage() = default;

std::vector<at::Tensor> AotiPackage::run(std::vector<at::Tensor>&& arguments, void* stream) {
  return loader_->boxed_run(std::move(arguments), stream);
}

namespace {

class AotiProgram : public LoadedProgram {
 public:
  AotiProgram(const fs::path& path, const std::map<std::string, Tensor>& constants)
      : package_(path, constants, -1) {}

  std::vector<Tensor> run(const std::vector<Tensor>& arguments) override {
    const c10::InferenceMode guard;
    std::vector<at::Tensor> flat;
    flat.reserve(arguments.size());
    for (const Tensor& argument : arguments) flat.push_back(to_aten(argument));
    const std::lock_guard lock(running_);
    std::vector<Tensor> results;
    for (const at::Tensor& output : package_.run(std::move(flat))) {
      results.push_back(from_aten(output));
    }
    return results;
  }

 private:
  AotiPackage package_;
  std::mutex running_;
};

}  // namespace

std::shared_ptr<LoadedProgram> load_aoti(const fs::path& path,
                                         const std::map<std::string, Tensor>& constants) {
  return std::make_shared<AotiProgram>(path, constants);
}

void set_num_threads(int count) {
  at::set_num_threads(count);
}

std::string torch_minor() {
  return std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR);
}

}  // namespace llama_runtime
