#include "compat.h"

#include <sys/utsname.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <set>
#include <sstream>

#include "aoti.h"
#include "cuda.h"
#include "onnx.h"

namespace llama_runtime {
namespace {

std::string architecture() {
  utsname name{};
  return uname(&name) == 0 ? name.machine : "unknown";
}

// The features that the kernel reports for this CPU; none where it reports none.
const std::set<std::string>& cpu_flags() {
  static const std::set<std::string> flags = [] {
    std::ifstream file("/proc/cpuinfo");
    std::set<std::string> found;
    for (std::string line; std::getline(file, line);) {
      if (!line.starts_with("flags") && !line.starts_with("Features")) continue;
      std::istringstream words(line.substr(line.find(':') + 1));
      for (std::string word; words >> word;) found.insert(word);
      break;
    }
    return found;
  }();
  return flags;
}

std::string lacking_flags(const Target& target) {
  std::string lacking;
  std::set<std::string> needed(target.cpu_flags.begin(), target.cpu_flags.end());
  for (const std::string& flag : needed) {
    if (!cpu_flags().contains(flag)) lacking += (lacking.empty() ? "" : ", ") + flag;
  }
  return lacking;
}

// Major and minor number of a release such as `1.23.2`.
std::pair<int, int> numbers(const std::string& release) {
  std::pair<int, int> found;
  std::sscanf(release.c_str(), "%d.%d", &found.first, &found.second);
  return found;
}

std::optional<Error> onnx_misfit(const ProgramRecord& program) {
  const std::optional<std::string> here = onnxruntime_version();
  if (!here) {
    return Error(ErrorCode::kCompatibility, "this runtime was built without ONNX Runtime",
                 program.file, "build it with -DLLAMA_RUNTIME_ONNX=ON");
  }
  const auto needed = program.requires_.find("onnxruntime");
  if (needed == program.requires_.end() || numbers(needed->second) <= numbers(*here)) {
    return std::nullopt;
  }
  return Error(ErrorCode::kCompatibility,
               "needs onnxruntime " + needed->second + ", this is " + *here, program.file,
               "build this runtime with a newer ONNX Runtime");
}

}  // namespace

std::vector<std::string> runnable_formats() {
  if (onnxruntime_version()) return {"aoti", "onnx"};
  return {"aoti"};
}

std::optional<Error> misfit(const ProgramRecord& program, const LoadOptions& options) {
  const auto refuse = [&program](const std::string& message, const std::string& hint) {
    return Error(ErrorCode::kCompatibility, message, program.file, hint);
  };
  const std::string rebuild = "build it for this machine: `llama-export build ... --format aoti`";
  if (program.shards > 1) {
    const std::string count = std::to_string(program.shards);
    return refuse(
        "needs " + count + " processes with torch.distributed, which this runtime lacks",
        "run it with torchrun --standalone --nproc-per-node " + count + " -m llama_runtime");
  }
  const std::string kind = options.device.substr(0, options.device.find(':'));
  if (program.target.device != kind) {
    return refuse(
        "made for " + program.target.device + ", asked for " + options.device,
        "load it with --device " + program.target.device + ", or build it with --device " + kind);
  }
  if (program.format == "onnx" && kind == "cpu") return onnx_misfit(program);
  if (program.format != "aoti") {
    return refuse("expected a program in format aoti" +
                      std::string(kind == "cpu" ? " or onnx" : "") + ", got " + program.format,
                  rebuild);
  }
  if (!options.allow_native) {
    return refuse("native code, which --no-native refuses",
                  "use onnx, or the Python runtime with pt2");
  }
  const auto torch = program.requires_.find("torch");
  const std::string made = torch == program.requires_.end() ? "unknown" : torch->second;
  if (made != torch_minor()) {
    return refuse("made with torch " + made + ", this is " + torch_minor(),
                  "build this runtime with torch " + made + ".*, or " + rebuild);
  }
  if (program.target.machine && *program.target.machine != architecture()) {
    return refuse("made for " + *program.target.machine + ", this machine is " + architecture(),
                  rebuild);
  }
  if (const std::string lacking = lacking_flags(program.target); !lacking.empty()) {
    return refuse("needs CPU features that this machine lacks: " + lacking, rebuild);
  }
  if (const auto& needed = program.target.capability) {
    const int number = options.device == kind ? 0 : options.device.back() - '0';
    const std::string here = cuda_capability(number).value_or("none");
    if (here != *needed) {
      return refuse("made for compute capability " + *needed + ", this device has " + here,
                    rebuild);
    }
  }
  return std::nullopt;
}

}  // namespace llama_runtime
