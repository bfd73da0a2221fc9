// Text to token ids and back, from a `tokenizer.json`.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace llama_runtime {

class TextStream;

// Byte-level BPE with the pre-tokenizers Split (a regular expression), Digits and ByteLevel, as in
// Llama 3 and SmolLM2; gives the ids that the `tokenizers` library gives. Everything else is
// refused by name. Immutable; safe to share between threads; copies share their tables.
class Tokenizer {
 public:
  // Throws Error(kTokenizer): missing, malformed, or declares what is not implemented.
  static Tokenizer load(const std::filesystem::path& path);

  // The ids of UTF-8 text, with the special tokens that the tokenizer itself adds. Throws
  // Error(kInput) where it is not UTF-8.
  std::vector<int32_t> encode(std::string_view text) const;

  // The text of the ids without special tokens; ids that the vocabulary lacks have no text.
  std::string decode(const std::vector<int32_t>& ids) const;

  // A new incremental `decode`, which keeps the tables alive.
  TextStream stream() const;

  struct Tables;

 private:
  explicit Tokenizer(std::shared_ptr<const Tables> tables) : tables_(std::move(tables)) {}
  std::shared_ptr<const Tables> tables_;
};

// `Tokenizer::decode` for tokens that come one by one; what `push` gave is final. Half a character
// is held back until it is whole, or until `finish`.
class TextStream {
 public:
  explicit TextStream(std::shared_ptr<const Tokenizer::Tables> tables)
      : tables_(std::move(tables)) {}
  std::string push(int32_t id);
  std::string finish();

 private:
  std::string take(bool is_last);

  std::shared_ptr<const Tokenizer::Tables> tables_;
  std::string bytes_;
};

}  // namespace llama_runtime
