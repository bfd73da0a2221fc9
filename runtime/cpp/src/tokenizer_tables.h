// What a `tokenizer.json` holds, as tables.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "llama_runtime/tokenizer.h"
#include "splitter.h"

namespace llama_runtime {

// What two neighbouring tokens become, and how early: a lower rank is merged first.
struct Merge {
  int32_t rank;
  int32_t id;
};

// Text that is one token wherever it stands.
struct AddedToken {
  std::string text;
  int32_t id;
};

struct Tokenizer::Tables {
  std::unordered_map<std::string, int32_t> vocab;  // as bytes, not as the file's characters
  std::unordered_map<int32_t, std::string> bytes_of;
  std::unordered_map<uint64_t, Merge> merges;  // by `pair_key`
  std::array<int32_t, 256> byte_ids{};         // -1: a byte without a token is dropped
  bool ignores_merges = false;                 // a word that is a token is not split
  std::vector<AddedToken> added[2];            // matched in the text first, then in what is left
  std::unordered_set<int32_t> special;         // without text
  std::vector<PreTokenizer> pre_tokenizers;
  std::vector<int32_t> prefix, suffix;  // what the post-processor puts around a text
};

inline uint64_t pair_key(int32_t first, int32_t second) {
  return static_cast<uint64_t>(static_cast<uint32_t>(first)) << 32 | static_cast<uint32_t>(second);
}

// The tokens of one word, by merging its bytes.
void append_word(const Tokenizer::Tables& tables, std::string_view word, std::vector<int32_t>& ids);

}  // namespace llama_runtime
