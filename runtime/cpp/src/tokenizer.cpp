#include "llama_runtime/tokenizer.h"

#include <algorithm>

#include "llama_runtime/error.h"
#include "text.h"
#include "tokenizer_tables.h"

namespace llama_runtime {
namespace {

// A part of the text: an added token, or text that is yet to be cut.
struct Part {
  std::string_view text;
  int32_t id;  // -1: text
};

// Of the tokens that begin at `position` the longest, or nullptr; `tokens` are longest first.
const AddedToken* token_at(const std::vector<AddedToken>& tokens, std::string_view text,
                           size_t position) {
  const std::string_view rest = text.substr(position);
  for (const AddedToken& token : tokens) {
    if (rest.starts_with(token.text)) return &token;
  }
  return nullptr;
}

std::vector<Part> cut(const std::vector<Part>& parts, const std::vector<AddedToken>& tokens) {
  std::vector<Part> result;
  bool is_start[256] = {};
  for (const AddedToken& token : tokens) is_start[static_cast<uint8_t>(token.text[0])] = true;
  for (const Part& part : parts) {
    size_t start = 0;
    for (size_t i = 0; part.id < 0 && i < part.text.size();) {
      const bool may_match = is_start[static_cast<uint8_t>(part.text[i])];
      const AddedToken* token = may_match ? token_at(tokens, part.text, i) : nullptr;
      if (token == nullptr) {
        ++i;
        continue;
      }
      if (i > start) result.push_back({part.text.substr(start, i - start), -1});
      result.push_back({part.text.substr(i, token->text.size()), token->id});
      start = i += token->text.size();
    }
    if (part.id >= 0) result.push_back(part);
    if (part.id < 0 && start < part.text.size()) result.push_back({part.text.substr(start), -1});
  }
  return result;
}

// Cuts text by one step after the other and merges each word.
void append_text(const Tokenizer::Tables& tables, std::string_view text, size_t step,
                 std::vector<int32_t>& ids) {
  if (step == tables.pre_tokenizers.size()) {
    append_word(tables, text, ids);
    return;
  }
  const PreTokenizer& cutter = tables.pre_tokenizers[step];
  std::string spaced;
  if (cutter.adds_prefix_space && !text.starts_with(" ")) {
    spaced = " " + std::string(text);
    text = spaced;
  }
  if (!cutter.splitter) {
    append_text(tables, text, step + 1, ids);
    return;
  }
  for (const std::string_view piece : cutter.splitter->split(text)) {
    append_text(tables, piece, step + 1, ids);
  }
}

}  // namespace

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  const Utf8Fault fault = find_utf8_fault(text);
  if (fault.reason != nullptr) {
    throw Error(
        ErrorCode::kInput,
        "expected UTF-8 text, got byte " + std::to_string(fault.position) + ": " + fault.reason,
        "text", "decode the bytes of the text as UTF-8");
  }
  std::vector<int32_t> ids = tables_->prefix;
  for (const Part& part : cut(cut({{text, -1}}, tables_->added[0]), tables_->added[1])) {
    if (part.id >= 0) {
      ids.push_back(part.id);
    } else if (!part.text.empty()) {
      append_text(*tables_, part.text, 0, ids);
    }
  }
  ids.insert(ids.end(), tables_->suffix.begin(), tables_->suffix.end());
  return ids;
}

std::string Tokenizer::decode(const std::vector<int32_t>& ids) const {
  TextStream text = stream();
  std::string result;
  for (const int32_t id : ids) result += text.push(id);
  return result + text.finish();
}

TextStream Tokenizer::stream() const {
  return TextStream(tables_);
}

std::string TextStream::push(int32_t id) {
  const auto found = tables_->bytes_of.find(id);
  if (found == tables_->bytes_of.end() || tables_->special.contains(id)) return "";
  bytes_ += found->second;
  return take(false);
}

std::string TextStream::finish() {
  return take(true);
}

// The characters that are whole; a bad byte becomes U+FFFD, and so does what ends too early.
std::string TextStream::take(bool is_last) {
  std::string text;
  size_t start = 0;
  while (true) {
    const Utf8Fault fault = find_utf8_fault(bytes_, start);
    text.append(bytes_, start, fault.position - start);
    start = fault.position;
    if (fault.reason == nullptr) break;
    const bool is_cut = fault.position + fault.num_bytes == bytes_.size() &&
                        fault.reason == std::string_view("unexpected end of data");
    if (is_cut && !is_last) break;
    append_char(text, 0xFFFD);
    start += fault.num_bytes;
  }
  bytes_.erase(0, start);
  return text;
}

}  // namespace llama_runtime
