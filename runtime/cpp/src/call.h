// The check of a call against the signature of its program.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "llama_runtime/manifest.h"
#include "llama_runtime/state.h"

namespace llama_runtime {

// The size of each dimension in a call. Throws Error(kInput): an input is missing, unknown, or of
// another dtype, shape or value than declared, or the states are not those of the signature.
Sizes check_call(const Signature& signature, const std::string& entry, const States* states,
                 const std::map<std::string, Tensor>& inputs);

// Refuses values out of the bounds of an input, such as a position past the capacity.
void check_values(const TensorSpec& spec, int64_t smallest, int64_t largest, const Sizes& sizes);

// Throws Error(kIntegrity): the results are not what the signature declares.
void check_results(const ProgramRecord& record, const std::vector<Tensor>& results,
                   const Sizes& sizes);

}  // namespace llama_runtime
