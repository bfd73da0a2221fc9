#include "text.h"

#include <cstdio>

namespace llama_runtime {
namespace {

constexpr size_t kMaxShownChars = 120;

// The length of a character by its first byte, 0 for none; `low` and `high` bound its second byte.
size_t char_len(uint8_t first, uint8_t& low, uint8_t& high) {
  low = 0x80;
  high = 0xBF;
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first <= 0xDF) return 2;
  if (first >= 0xE0 && first <= 0xEF) {
    if (first == 0xE0) low = 0xA0;
    if (first == 0xED) high = 0x9F;  // surrogates
    return 3;
  }
  if (first >= 0xF0 && first <= 0xF4) {
    if (first == 0xF0) low = 0x90;
    if (first == 0xF4) high = 0x8F;
    return 4;
  }
  return 0;
}

// The character at `start`: its length and no reason, or what is wrong with it.
Utf8Fault read_char(std::string_view text, size_t start) {
  uint8_t low = 0, high = 0;
  const size_t len = char_len(static_cast<uint8_t>(text[start]), low, high);
  if (len == 0) return {start, 1, "invalid start byte"};
  for (size_t k = 1; k < len; ++k) {
    if (start + k == text.size()) return {start, k, "unexpected end of data"};
    const auto byte = static_cast<uint8_t>(text[start + k]);
    if (byte < low || byte > high) return {start, k, "invalid continuation byte"};
    low = 0x80;
    high = 0xBF;
  }
  return {start, len, nullptr};
}

bool is_printable(char32_t c) {
  if (c < 0x20 || (c >= 0x7F && c <= 0xA0) || c == 0xAD || c == 0xFEFF) return false;
  if ((c >= 0x2000 && c <= 0x200F) || (c >= 0x2028 && c <= 0x202F)) return false;
  if ((c >= 0x205F && c <= 0x206F) || c == 0x3000 || c == 0x1680) return false;
  return !(c >= 0xE000 && c <= 0xF8FF) && c < 0xE0000;
}

std::string escaped(char32_t c) {
  char buffer[16];
  const char* form = c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x";
  std::snprintf(buffer, sizeof buffer, form, static_cast<unsigned>(c));
  return c == '\n' ? "\\n" : c == '\t' ? "\\t" : c == '\r' ? "\\r" : buffer;
}

}  // namespace

Utf8Fault find_utf8_fault(std::string_view text, size_t start) {
  while (start < text.size()) {
    const Utf8Fault read = read_char(text, start);
    if (read.reason != nullptr) return read;
    start += read.num_bytes;
  }
  return {start, 0, nullptr};
}

char32_t next_char(std::string_view text, size_t& position) {
  const Utf8Fault read = read_char(text, position);
  const auto first = static_cast<uint8_t>(text[position]);
  position += read.num_bytes;
  if (read.reason != nullptr) return 0xFFFD;
  if (read.num_bytes == 1) return first;
  char32_t c = first & (0xFF >> (read.num_bytes + 1));
  for (size_t k = read.position + 1; k < position; ++k) {
    c = (c << 6) | (static_cast<uint8_t>(text[k]) & 0x3F);
  }
  return c;
}

void append_char(std::string& text, char32_t c) {
  const auto put = [&text](char32_t byte) { text += static_cast<char>(byte); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | (c >> 6));
    put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    put(0xE0 | (c >> 12));
    put(0x80 | ((c >> 6) & 0x3F));
    put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | (c >> 18));
    put(0x80 | ((c >> 12) & 0x3F));
    put(0x80 | ((c >> 6) & 0x3F));
    put(0x80 | (c & 0x3F));
  }
}

size_t num_chars(std::string_view text) {
  size_t count = 0;
  for (const char byte : text) count += (static_cast<uint8_t>(byte) & 0xC0) != 0x80;
  return count;
}

std::string printable(std::string_view text) {
  std::string escaped_text;
  size_t count = 0;
  for (size_t i = 0; i < text.size(); ++count) {
    if (count >= kMaxShownChars) return escaped_text + "...";
    const char32_t c = next_char(text, i);
    if (is_printable(c)) {
      append_char(escaped_text, c);
    } else {
      const std::string code = escaped(c);
      escaped_text += code;
      count += code.size() - 1;
    }
  }
  return escaped_text;
}

std::string shown(std::string_view text) {
  return "`" + printable(text) + "`";
}

std::string with_commas(int64_t number) {
  std::string text = std::to_string(number);
  const size_t first = text[0] == '-' ? 1 : 0;
  for (size_t i = text.size(); i > first + 3; i -= 3) text.insert(i - 3, ",");
  return text;
}

}  // namespace llama_runtime
