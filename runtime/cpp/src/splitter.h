// How text is cut into words before it is merged into tokens.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace llama_runtime {

// A regular expression of a `tokenizer.json` (Oniguruma's syntax), run by PCRE2. Immutable; safe
// to share between threads.
class Splitter {
 public:
  // Throws Error(kTokenizer): not a regular expression that PCRE2 understands; `where` is named.
  Splitter(const std::string& pattern, const std::string& where);

  // Cuts sound UTF-8 into matches and what lies between them, in order, none empty.
  // Throws Error(kTokenizer): the text needs more backtracking than PCRE2 allows.
  std::vector<std::string_view> split(std::string_view text) const;

 private:
  struct Compiled;
  std::shared_ptr<const Compiled> compiled_;
};

// One step. Where `splitter` is empty, text is not cut.
struct PreTokenizer {
  std::shared_ptr<const Splitter> splitter;
  bool adds_prefix_space = false;
};

}  // namespace llama_runtime
