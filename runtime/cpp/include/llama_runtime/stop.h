// Texts that end a generation.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace llama_runtime {

// Passes streamed text on until one of the stop texts is complete, and never shows a part of one.
// The match that ends first wins, and of two that end together the longer one: the result depends
// on the text alone, not on the pieces that it came in. Text is held back only while it is the
// beginning of a stop text. Not for use from two threads at the same time.
class StopTexts {
 public:
  // Throws Error(kInput): one of them is empty.
  explicit StopTexts(std::vector<std::string> stops);

  // Takes the next piece, and returns what can no longer be part of a stop text; nothing after a
  // match.
  std::string push(std::string_view piece);
  // What is still held back; to be called when no more text comes.
  std::string finish();
  // The one that was found.
  const std::optional<std::string>& matched() const { return matched_; }

 private:
  // How much of one stop text the text so far ends with.
  struct Matcher {
    explicit Matcher(std::string text);
    bool advance(char c);  // true when the stop text is complete

    std::string stop;
    std::vector<size_t> borders;  // of each beginning: the longest other one that it ends with
    size_t num_matched = 0;
  };

  std::vector<Matcher> matchers_;  // the longest comes first
  std::string held_;
  std::optional<std::string> matched_;
};

}  // namespace llama_runtime
