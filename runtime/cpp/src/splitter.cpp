#define PCRE2_CODE_UNIT_WIDTH 8
#include "splitter.h"

#include <pcre2.h>

#include "llama_runtime/error.h"
#include "text.h"

namespace llama_runtime {
namespace {

// Unicode's White_Space; PCRE2's own \s has U+180E besides.
constexpr const char* kSpaces =
    R"(\x{9}-\x{D}\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";

// The pattern with \s and \S spelled out.
std::string translated(const std::string& pattern) {
  std::string result;
  bool is_in_class = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    const char next = c == '\\' && i + 1 < pattern.size() ? pattern[i + 1] : '\0';
    if (next == 's' || (next == 'S' && !is_in_class)) {
      result += is_in_class ? kSpaces : (next == 's' ? "[" : "[^") + std::string(kSpaces) + "]";
      ++i;
    } else if (next != '\0') {
      result += {c, next};
      ++i;
    } else {
      is_in_class = c == '[' || (is_in_class && c != ']');
      result += c;
    }
  }
  return result;
}

}  // namespace

struct Splitter::Compiled {
  pcre2_code* code = nullptr;
  std::string where;

  Compiled() = default;
  Compiled(const Compiled&) = delete;
  Compiled& operator=(const Compiled&) = delete;
  ~Compiled() { pcre2_code_free(code); }

  // Finds the next match at or after `start`.
  bool match(std::string_view text, size_t start, pcre2_match_data* found) const {
    const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
    int count = pcre2_match(code, subject, text.size(), start, PCRE2_NO_UTF_CHECK, found, nullptr);
    if (count == PCRE2_ERROR_JIT_STACKLIMIT) {
      count = pcre2_match(code, subject, text.size(), start, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                          found, nullptr);
    }
    if (count < 0 && count != PCRE2_ERROR_NOMATCH) {
      throw Error(ErrorCode::kTokenizer,
                  "the text cannot be cut into words: PCRE2 error " + std::to_string(count), where);
    }
    return count >= 0;
  }
};

Splitter::Splitter(const std::string& pattern, const std::string& where) {
  auto compiled = std::make_shared<Compiled>();
  compiled->where = where;
  const std::string own = translated(pattern);
  int error = 0;
  PCRE2_SIZE position = 0;
  compiled->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(own.data()), own.size(),
                                 PCRE2_UTF | PCRE2_UCP, &error, &position, nullptr);
  if (compiled->code == nullptr) {
    throw Error(ErrorCode::kTokenizer, "expected a regular expression, got " + shown(pattern),
                where);
  }
  pcre2_jit_compile(compiled->code, PCRE2_JIT_COMPLETE);  // where there is no JIT it is slower
  compiled_ = std::move(compiled);
}

std::vector<std::string_view> Splitter::split(std::string_view text) const {
  const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> found(
      pcre2_match_data_create_from_pattern(compiled_->code, nullptr), pcre2_match_data_free);
  std::vector<std::string_view> pieces;
  size_t end_of_last = 0;
  for (size_t start = 0; start < text.size();) {
    if (!compiled_->match(text, start, found.get())) break;
    const PCRE2_SIZE* place = pcre2_get_ovector_pointer(found.get());
    if (place[0] == place[1]) {  // empty: try again one character later
      start = place[1];
      if (start < text.size()) next_char(text, start);
      continue;
    }
    if (place[0] > end_of_last) pieces.push_back(text.substr(end_of_last, place[0] - end_of_last));
    pieces.push_back(text.substr(place[0], place[1] - place[0]));
    start = end_of_last = place[1];
  }
  if (end_of_last < text.size()) pieces.push_back(text.substr(end_of_last));
  return pieces;
}

}  // namespace llama_runtime
