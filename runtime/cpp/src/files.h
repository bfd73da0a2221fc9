// Files: what they are, where links lead, their bytes and digests.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "llama_runtime/error.h"

namespace llama_runtime {

inline constexpr const char* kLinkHint =
    "copy the bundle with its files in place of the links (cp -rL)";

struct Status {
  int error = 0;  // errno, or 0
  bool is_plain = false;
  int64_t num_bytes = 0;
};

// Follows links.
Status file_status(const std::filesystem::path& path);

// The system's words for an errno.
std::string os_text(int error);

// Whether a file of a bundle is a link to a file outside of its folder, or one that cannot be
// followed. The hub's cache is let through: `snapshots/<revision>` links into the `blobs` beside.
bool leads_out(const std::filesystem::path& path);

// Throws Error of kind `code`.
std::string read_bytes(const std::filesystem::path& path, ErrorCode code);

// The SHA-256 in lowercase hexadecimal digits.
std::string sha256_text(std::string_view data);
// Of the file's bytes from `start` up to `end`, or to its end where that is nullopt. Throws
// Error(kIntegrity) where it cannot be read.
std::string sha256_file(const std::filesystem::path& path, int64_t start = 0,
                        std::optional<int64_t> end = std::nullopt);

// A file's bytes, mapped read-only; `data` is nullptr where it is empty.
struct Map {
  std::shared_ptr<const uint8_t> data;
  int64_t num_bytes = 0;
};

// Throws Error(kIntegrity) where it cannot be read.
Map map_file(const std::filesystem::path& path);

}  // namespace llama_runtime
