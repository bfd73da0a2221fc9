// Safetensors files: the header read and checked in full, the data mapped.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "llama_runtime/tensor.h"

namespace llama_runtime {

// One tensor of a file; `start` and `end` are byte offsets from the beginning of the file.
struct StoredTensor {
  std::string name;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  int64_t start = 0;
  int64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<StoredTensor> tensors;  // in the order of the data, without overlap or hole
  std::map<std::string, std::string> metadata;
  int64_t data_start = 0;
  int64_t data_end = 0;  // the size of a whole file
};

// Checks the bytes of a whole file; `where` is what errors name. Throws Error(kIntegrity): it is
// something else, truncated, padded, or breaks the format. Nothing beyond `data` is read.
SafetensorsHeader parse_safetensors(std::string_view data, const std::string& where);

// A mapped file.
struct MappedWeights {
  SafetensorsHeader header;
  std::string header_sha256;              // of the bytes up to the data
  std::map<std::string, Tensor> tensors;  // views of the map; those not aligned are copies
};

// Maps a file read-only: whoever writes into a tensor of it crashes. The map lives as long as any
// of the tensors. Throws Error(kIntegrity) as `parse_safetensors`, or where it cannot be read.
MappedWeights map_safetensors(const std::filesystem::path& path);

}  // namespace llama_runtime
