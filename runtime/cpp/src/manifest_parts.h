// What `manifest.cpp` reads with the help of other files.
#pragma once

#include "llama_runtime/manifest.h"
#include "node.h"

namespace llama_runtime {

Signature read_signature(const Node& node);

// Refuses a manifest whose parts contradict each other.
void check_files(const Node& node, const Manifest& manifest);
void check_weights(const Node& node, const Manifest& manifest);

}  // namespace llama_runtime
