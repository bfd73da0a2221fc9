// Whether this machine and this build can run a program, decided before anything is loaded.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "llama_runtime/error.h"
#include "llama_runtime/manifest.h"
#include "llama_runtime/model.h"

namespace llama_runtime {

// The formats that this build runs, the preferred one first.
std::vector<std::string> runnable_formats();

// Why not, or nullopt.
std::optional<Error> misfit(const ProgramRecord& program, const LoadOptions& options);

}  // namespace llama_runtime
