#include "node.h"

#include <algorithm>

#include "text.h"

namespace llama_runtime {
namespace {

constexpr size_t kMaxTextChars = 1000;

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

bool is_alpha(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

// From 1 to 999,999,999, without leading zeros.
bool is_factor(std::string_view text) {
  return !text.empty() && text.size() <= 9 && text[0] != '0' &&
         std::all_of(text.begin(), text.end(), is_digit);
}

}  // namespace

void Node::keys(std::initializer_list<std::string_view> known) const {
  std::vector<std::string> unknown;
  for (const Member& member : object()) {
    if (std::find(known.begin(), known.end(), member.key) == known.end()) {
      unknown.push_back(member.key);
    }
  }
  std::sort(unknown.begin(), unknown.end());
  for (const std::string& key : unknown) {
    if (ignored_ == nullptr) child(*json_, join(path_, key)).fail("unknown key");
    ignored_->push_back(join(path_, key));
  }
}

Node Node::field(std::string_view key) const {
  const std::optional<Node> node = optional(key);
  if (!node) child(*json_, join(path_, key)).fail("missing key");
  return *node;
}

std::optional<Node> Node::optional(std::string_view key) const {
  const Json* value = find(object(), key);
  if (value == nullptr) return std::nullopt;
  return child(*value, join(path_, key));
}

bool Node::boolean() const {
  if (const bool* value = std::get_if<bool>(&json_->value)) return *value;
  fail(std::string("expected a boolean, got ") + type());
}

int64_t Node::integer() const {
  if (const int64_t* value = std::get_if<int64_t>(&json_->value)) return *value;
  if (is_integer()) fail("expected an integer of 64 bits");
  fail(std::string("expected an integer, got ") + type());
}

int64_t Node::at_least(int64_t smallest) const {
  const int64_t value = integer();
  if (value < smallest) {
    fail("expected at least " + std::to_string(smallest) + ", got " + std::to_string(value));
  }
  return value;
}

double Node::number() const {
  if (is_integer()) return static_cast<double>(integer());
  if (const double* value = std::get_if<double>(&json_->value)) return *value;
  fail(std::string("expected a number, got ") + type());
}

std::string Node::text() const {
  const auto* value = std::get_if<std::string>(&json_->value);
  if (value == nullptr) fail(std::string("expected a string, got ") + type());
  check_text(*value);
  return *value;
}

std::string Node::text(bool (*matches)(std::string_view), const char* what) const {
  std::string value = text();
  check_key(value, matches, what);
  return value;
}

std::string Node::one_of(std::initializer_list<std::string_view> choices) const {
  const auto* value = std::get_if<std::string>(&json_->value);
  if (value && std::find(choices.begin(), choices.end(), *value) != choices.end()) return *value;
  std::string expected;
  for (const std::string_view choice : choices) {
    expected += (expected.empty() ? "" : ", ") + shown(choice);
  }
  fail("expected one of " + expected + ", got " + (value ? shown(*value) : type()));
}

DType Node::dtype() const {
  const std::string name = text();
  const DTypeRow* row = dtype_from_name(name);
  if (row == nullptr) fail("unknown dtype " + shown(name));
  return row->dtype;
}

std::optional<std::string> Node::text_or_null() const {
  if (is_null()) return std::nullopt;
  return text();
}

bool Node::is_integer() const {
  return std::holds_alternative<int64_t>(json_->value) ||
         std::holds_alternative<HugeInteger>(json_->value);
}

bool Node::is_text() const {
  return std::holds_alternative<std::string>(json_->value);
}

std::vector<Node> Node::items() const {
  const auto* list = std::get_if<JsonList>(&json_->value);
  if (list == nullptr) fail(std::string("expected a list, got ") + type());
  std::vector<Node> nodes;
  nodes.reserve(list->size());
  for (size_t i = 0; i < list->size(); ++i) {
    nodes.push_back(child((*list)[i], path_ + "[" + std::to_string(i) + "]"));
  }
  return nodes;
}

std::vector<std::pair<std::string, Node>> Node::members() const {
  std::vector<std::pair<std::string, Node>> nodes;
  for (const Member& member : object()) {
    Node node = child(member.value, join(path_, member.key));
    node.check_text(member.key);
    nodes.emplace_back(member.key, std::move(node));
  }
  return nodes;
}

void Node::check_key(const std::string& key, bool (*matches)(std::string_view),
                     const char* what) const {
  if (!matches(key)) fail(std::string("expected ") + what + ", got " + shown(key));
}

void Node::fail(const std::string& message) const {
  throw Error(ErrorCode::kManifest, message, path_.empty() ? *where_ : *where_ + "#" + path_);
}

void Node::check_text(const std::string& text) const {
  const size_t count = num_chars(text);
  if (count > kMaxTextChars) {
    fail("expected at most 1000 characters, got " + std::to_string(count));
  }
  for (size_t i = 0; i < text.size();) {
    const char32_t c = next_char(text, i);
    if (c < 0x20 || (c >= 0x7F && c <= 0x9F)) {
      fail("expected text without control characters, got " + shown(text));
    }
  }
}

const JsonObject& Node::object() const {
  const auto* object = std::get_if<JsonObject>(&json_->value);
  if (object == nullptr) fail(std::string("expected an object, got ") + type());
  return *object;
}

bool is_file_name(std::string_view text) {
  const auto is_good = [](char c) {
    return is_alpha(c) || is_digit(c) || std::string_view("._<>+=,-").find(c) != std::string::npos;
  };
  return !text.empty() && text.size() <= 200 && (is_alpha(text[0]) || is_digit(text[0])) &&
         std::all_of(text.begin(), text.end(), is_good);
}

bool is_identifier(std::string_view text) {
  const auto is_good = [](char c) { return is_alpha(c) || is_digit(c) || c == '_'; };
  return !text.empty() && text.size() <= 100 && !is_digit(text[0]) &&
         std::all_of(text.begin(), text.end(), is_good);
}

bool is_dim_size(std::string_view text) {
  const size_t star = text.find('*');
  if (star == text.npos) return is_identifier(text);
  return is_factor(text.substr(0, star)) && is_identifier(text.substr(star + 1));
}

bool is_entry_name(std::string_view text) {
  const size_t bracket = text.find('<');
  if (bracket == text.npos) return is_identifier(text);
  return text.back() == '>' && is_identifier(text.substr(0, bracket)) &&
         is_factor(text.substr(bracket + 1, text.size() - bracket - 2));
}

bool is_sha256(std::string_view text) {
  const auto is_good = [](char c) { return is_digit(c) || (c >= 'a' && c <= 'f'); };
  return text.size() == 64 && std::all_of(text.begin(), text.end(), is_good);
}

}  // namespace llama_runtime
