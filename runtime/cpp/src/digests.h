// Files held against the digests that a manifest lists of them.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "llama_runtime/manifest.h"

namespace llama_runtime {

// How the bytes of a file differ from what is listed, in a few words; nullopt where they do not.
// Blocks are hashed side by side, one for each processor. Throws Error(kIntegrity) where the file
// cannot be read.
std::optional<std::string> difference(const std::filesystem::path& path, const File& file);

}  // namespace llama_runtime
