#include "strict_json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "text.h"

namespace llama_runtime {
namespace {

constexpr int64_t kMaxValues = 1 << 20;  // commas and opening brackets
constexpr size_t kMaxDepth = 32;
constexpr size_t kMaxDigits = 4300;  // a longer integer is no number for any reader

bool is_integer(std::string_view token) {
  if (token.substr(0, 1) == "-") token.remove_prefix(1);
  return !token.empty() && token.find_first_not_of("0123456789") == token.npos;
}

// Receives the parser's events and builds the value; throws on what the format refuses.
class Builder final : public nlohmann::json_sax<nlohmann::json> {
 public:
  Builder(std::string_view text, const std::string& where, ErrorCode code)
      : text_(text), where_(where), code_(code) {}

  bool null() override { return add({nullptr}); }
  bool boolean(bool value) override { return add({value}); }
  bool number_integer(int64_t value) override { return add({value}); }
  bool number_unsigned(uint64_t value) override {
    if (value > static_cast<uint64_t>(INT64_MAX)) return add({HugeInteger{}});
    return add({static_cast<int64_t>(value)});
  }
  bool number_float(double value, const std::string& token) override {
    return is_integer(token) ? add({HugeInteger{}}) : add({value});
  }
  bool string(std::string& value) override { return add({std::move(value)}); }
  bool binary(nlohmann::json::binary_t&) override { return false; }
  bool start_object(size_t) override { return start({JsonObject{}}); }
  bool start_array(size_t) override { return start({JsonList{}}); }
  bool end_object() override { return end(); }
  bool end_array() override { return end(); }

  bool key(std::string& key) override {
    if (depth_ > kMaxDepth) return true;
    if (!frames_.back().seen.insert(key).second) {
      fail("duplicate JSON key " + shown(key), "");
    }
    frames_.back().key = std::move(key);
    return true;
  }

  // What the parser cannot read, although the format's readers name it by its key.
  bool parse_error(size_t position, const std::string& token,
                   const nlohmann::json::exception& error) override {
    const std::string reason = error.what();
    const std::string_view rest = text_.substr(std::min(position ? position - 1 : 0, text_.size()));
    if (rest.starts_with("NaN")) fail("expected a finite number, got `nan`", path());
    if (rest.starts_with("Infinity")) {
      const bool is_negative = position >= 2 && text_[position - 2] == '-';
      const std::string sign = is_negative ? "-" : "";
      fail("expected a finite number, got `" + sign + "inf`", path());
    }
    if (reason.find("out_of_range.406") != reason.npos) {
      if (!is_integer(token)) {
        const std::string sign = token[0] == '-' ? "-" : "";
        fail("expected a finite number, got `" + sign + "inf`", path());
      }
      if (token.size() <= kMaxDigits) fail("expected an integer of 64 bits", path());
    }
    if (reason.find("surrogate") != reason.npos) {
      const size_t slash = text_.rfind("\\u", position);
      const std::string code(text_.substr(slash == text_.npos ? 0 : slash, 6));
      fail("expected text without control characters, got " + shown(code), path());
    }
    const size_t colon = reason.find("] ");
    fail("expected valid JSON: " + printable(reason.substr(colon == reason.npos ? 0 : colon + 2)),
         "");
    return false;
  }

  Json finish() {
    if (too_deep_) fail("expected at most 32 levels of objects and lists", too_deep_path_);
    return std::move(root_);
  }

 private:
  struct Frame {
    Json value;
    std::string key;
    std::unordered_set<std::string> seen;
  };

  bool add(Json value) {
    if (depth_ > kMaxDepth) return true;
    if (frames_.empty()) {
      root_ = std::move(value);
    } else if (auto* list = std::get_if<JsonList>(&frames_.back().value.value)) {
      list->push_back(std::move(value));
    } else {
      std::get<JsonObject>(frames_.back().value.value)
          .push_back({frames_.back().key, std::move(value)});
    }
    return true;
  }

  bool start(Json empty) {
    if (++depth_ <= kMaxDepth) {
      frames_.push_back({std::move(empty), "", {}});
    } else if (!too_deep_) {
      too_deep_ = true;
      too_deep_path_ = path();
    }
    return true;
  }

  bool end() {
    if (depth_-- > kMaxDepth) return true;
    Json value = std::move(frames_.back().value);
    frames_.pop_back();
    return add(std::move(value));
  }

  std::string path() const {
    std::string path;
    for (const Frame& frame : frames_) {
      if (const auto* list = std::get_if<JsonList>(&frame.value.value)) {
        path += "[" + std::to_string(list->size()) + "]";
      } else {
        path = join(path, frame.key);
      }
    }
    return path;
  }

  [[noreturn]] void fail(const std::string& message, const std::string& path) const {
    throw Error(code_, message, path.empty() ? where_ : where_ + "#" + path);
  }

  std::string_view text_;
  const std::string& where_;
  ErrorCode code_;
  std::vector<Frame> frames_;
  Json root_{nullptr};
  size_t depth_ = 0;
  bool too_deep_ = false;
  std::string too_deep_path_;
};

}  // namespace

JsonObject parse_object(std::string_view text, const std::string& where, ErrorCode code) {
  const int64_t num_values = std::count_if(text.begin(), text.end(),
                                           [](char c) { return c == ',' || c == '[' || c == '{'; });
  if (num_values > kMaxValues) {
    throw Error(code, "expected at most 1,048,576 values, got " + with_commas(num_values), where);
  }
  const Utf8Fault fault = find_utf8_fault(text);
  if (fault.reason != nullptr) {
    const std::string place = std::to_string(fault.position);
    throw Error(code, "expected UTF-8 text, got byte " + place + ": " + fault.reason, where);
  }
  if (text.starts_with("\xEF\xBB\xBF")) {
    throw Error(code, "expected valid JSON: it begins with a byte order mark", where);
  }
  Builder builder(text, where, code);
  nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  Json root = builder.finish();
  if (auto* object = std::get_if<JsonObject>(&root.value)) return std::move(*object);
  throw Error(code, std::string("expected a JSON object, got ") + json_type(root), where);
}

const Json* find(const JsonObject& object, std::string_view key) {
  for (const Member& member : object) {
    if (member.key == key) return &member.value;
  }
  return nullptr;
}

const char* json_type(const Json& value) {
  constexpr const char* kNames[] = {"null",     "a boolean", "an integer", "an integer",
                                    "a number", "a string",  "a list",     "an object"};
  return kNames[value.value.index()];
}

std::string shown_value(const Json& value) {
  if (const auto* integer = std::get_if<int64_t>(&value.value)) {
    return shown(std::to_string(*integer));
  }
  if (const auto* number = std::get_if<double>(&value.value)) {
    return shown(nlohmann::json(*number).dump());
  }
  if (const auto* text = std::get_if<std::string>(&value.value)) return shown(*text);
  return json_type(value);
}

std::string join(const std::string& path, std::string_view key) {
  return path.empty() ? printable(key) : path + "." + printable(key);
}

}  // namespace llama_runtime
