// Draws ten times from each row of the logits in a safetensors file.
// Arguments: FILE TEMPERATURE TOP_K TOP_P MIN_P SEED
#include <cstdlib>
#include <iostream>

#include "llama_runtime/safetensors.h"
#include "llama_runtime/sampler.h"

int main(int, char** argv) {
  using namespace llama_runtime;
  const Tensor logits = map_safetensors(argv[1]).tensors.at("logits");
  Sampler sampler({std::atof(argv[2]), std::atoll(argv[3]), std::atof(argv[4]), std::atof(argv[5]),
                   std::strtoull(argv[6], nullptr, 10)});
  for (int draw = 0; draw < 10; ++draw) {
    for (const int32_t token : sampler.sample(logits)) std::cout << token << " ";
  }
}
