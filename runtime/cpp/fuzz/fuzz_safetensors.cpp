// Any bytes as a safetensors: read in full, or refused by an Error and by nothing else.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "llama_runtime/error.h"
#include "llama_runtime/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    llama_runtime::parse_safetensors({reinterpret_cast<const char*>(data), size}, "input");
  } catch (const llama_runtime::Error&) {
  }
  return 0;
}
