#include "llama_runtime/stop.h"

#include <algorithm>
#include <utility>

#include "llama_runtime/error.h"

namespace llama_runtime {

// Knuth, Morris and Pratt. Bytes do: in UTF-8 a match of characters is one of bytes.
StopTexts::Matcher::Matcher(std::string text) : stop(std::move(text)), borders(stop.size()) {
  size_t border = 0;
  for (size_t i = 1; i < stop.size(); ++i) {
    while (border > 0 && stop[border] != stop[i]) border = borders[border - 1];
    border += stop[border] == stop[i];
    borders[i] = border;
  }
}

bool StopTexts::Matcher::advance(char c) {
  while (num_matched > 0 && stop[num_matched] != c) num_matched = borders[num_matched - 1];
  num_matched += stop[num_matched] == c;
  return num_matched == stop.size();
}

StopTexts::StopTexts(std::vector<std::string> stops) {
  std::stable_sort(stops.begin(), stops.end(),
                   [](const auto& a, const auto& b) { return a.size() > b.size(); });
  for (std::string& stop : stops) {
    if (stop.empty()) {
      throw Error(ErrorCode::kInput, "expected a text of at least one character, got an empty one",
                  "stop", "leave it out if nothing should stop the text");
    }
    matchers_.emplace_back(std::move(stop));
  }
}

std::string StopTexts::push(std::string_view piece) {
  if (matched_) return "";
  for (const char c : piece) {
    held_ += c;
    for (Matcher& matcher : matchers_) {
      if (matcher.advance(c) && !matched_) matched_ = matcher.stop;
    }
    if (!matched_) continue;
    held_.resize(held_.size() - matched_->size());
    return std::exchange(held_, "");
  }
  size_t num_held = 0;
  for (const Matcher& matcher : matchers_) num_held = std::max(num_held, matcher.num_matched);
  std::string text = held_.substr(0, held_.size() - num_held);
  held_.erase(0, text.size());
  return text;
}

std::string StopTexts::finish() {
  for (Matcher& matcher : matchers_) matcher.num_matched = 0;
  return std::exchange(held_, "");
}

}  // namespace llama_runtime
