// UTF-8, and text that is fit for a one-line message.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace llama_runtime {

// What is wrong with text that should be UTF-8.
struct Utf8Fault {
  size_t position;     // of the first byte of the bad sequence
  size_t num_bytes;    // of the longest beginning of a character there, at least 1
  const char* reason;  // nullptr where the text is sound
};

// The first fault at or after `start`. Lone surrogates and what is beyond U+10FFFF are faults.
Utf8Fault find_utf8_fault(std::string_view text, size_t start = 0);

// The character at `position`, before the end; moves `position` past it. What is no character, such
// as one that a cut has shortened, reads as U+FFFD.
char32_t next_char(std::string_view text, size_t& position);
void append_char(std::string& text, char32_t c);
size_t num_chars(std::string_view text);

// As it is, but control characters and the like are escaped, and at most 120 characters.
std::string printable(std::string_view text);
// `printable` in backticks.
std::string shown(std::string_view text);
// 1,234,567
std::string with_commas(int64_t number);

}  // namespace llama_runtime
