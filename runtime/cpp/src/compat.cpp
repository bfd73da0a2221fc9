#include "compat.h"

#include <sys/utsname.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>

#include "aoti.h"

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

}  // namespace

std::optional<Error> misfit(const ProgramRecord& program, bool allow_native) {
  const auto refuse = [&program](const std::string& message, const std::string& hint) {
    return Error(ErrorCode::kCompatibility, message, program.file, hint);
  };
  const std::string rebuild = "build it for this machine: `llama-export build ... --format aoti`";
  if (program.target.device != "cpu") {
    return refuse("made for " + program.target.device + ", this runtime runs on cpu",
                  "build it with --device cpu");
  }
  if (program.format != "aoti") {
    return refuse("expected a program in format aoti, got " + program.format, rebuild);
  }
  if (!allow_native) {
    return refuse("native code, which --no-native refuses",
                  "use the Python runtime with pt2 or onnx");
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
  return std::nullopt;
}

}  // namespace llama_runtime
