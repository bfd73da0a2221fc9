// Whether this machine and this build can run a program, decided before anything is loaded.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "llama_runtime/error.h"
#include "llama_runtime/manifest.h"

namespace llama_runtime {

// The formats that this build runs, the preferred one first.
std::vector<std::string> runnable_formats();

// Why not, or nullopt.
std::optional<Error> misfit(const ProgramRecord& program, bool allow_native);

}  // namespace llama_runtime
