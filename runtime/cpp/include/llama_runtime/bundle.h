// A bundle on disk.
#pragma once

#include <filesystem>
#include <string>

#include "llama_runtime/manifest.h"
#include "llama_runtime/safetensors.h"

namespace llama_runtime {

// An opened bundle: its folder and its checked manifest.
struct Bundle {
  std::filesystem::path folder;
  Manifest manifest;

  std::filesystem::path path(const std::string& name) const { return folder / name; }
};

// Reads the manifest and checks that every listed file is there with its size. Throws Error:
// kCompatibility or kManifest as `read_manifest`; kIntegrity where a file is missing, no plain
// file, of another size, or a link out of the bundle.
Bundle open_bundle(const std::filesystem::path& folder);

// Hashes one listed file. Throws Error(kIntegrity) where it has another digest.
void check_digest(const Bundle& bundle, const std::string& name);

// Compares the whole folder with the manifest: digests, weights' headers, names. Throws
// Error(kIntegrity) with the first fault by file name.
void check_integrity(const Bundle& bundle);

// Maps every weights file. `weights_dir` holds those that are not in the bundle; it may be empty
// where the bundle is whole. Throws Error: kCompatibility where there are none or they are
// elsewhere; kIntegrity where a file is not what the manifest says.
std::map<std::string, Tensor> map_weights(const Bundle& bundle,
                                          const std::filesystem::path& weights_dir);

}  // namespace llama_runtime
