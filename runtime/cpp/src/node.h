// A JSON value with its key path, read strictly.
#pragma once

#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "llama_runtime/tensor.h"
#include "strict_json.h"

namespace llama_runtime {

// Every reading member throws Error(kManifest) with the key path where the value does not fit.
class Node {
 public:
  // `ignored` takes the paths of unknown keys; nullptr refuses them. All must outlive the node.
  Node(const Json& json, std::string path, const std::string& where,
       std::vector<std::string>* ignored)
      : json_(&json), path_(std::move(path)), where_(&where), ignored_(ignored) {}

  // Refuses what is no object, and unknown keys. To be called before `field`.
  void keys(std::initializer_list<std::string_view> known) const;
  Node field(std::string_view key) const;
  std::optional<Node> optional(std::string_view key) const;
  bool is_null() const { return json_->value.index() == 0; }

  bool boolean() const;
  int64_t integer() const;
  int64_t at_least(int64_t smallest) const;
  double number() const;
  std::string text() const;
  // Text that `matches` lets through; `what` says in words what that is.
  std::string text(bool (*matches)(std::string_view), const char* what) const;
  std::string one_of(std::initializer_list<std::string_view> choices) const;
  DType dtype() const;
  std::optional<std::string> text_or_null() const;

  bool is_integer() const;
  bool is_text() const;
  const char* type() const { return json_type(*json_); }

  std::vector<Node> items() const;
  // Members in the file's order; keys are checked as text.
  std::vector<std::pair<std::string, Node>> members() const;
  // A key of `members` that must match.
  void check_key(const std::string& key, bool (*matches)(std::string_view), const char* what) const;

  [[noreturn]] void fail(const std::string& message) const;

 private:
  void check_text(const std::string& text) const;
  const JsonObject& object() const;
  Node child(const Json& json, std::string path) const {
    return Node(json, std::move(path), *where_, ignored_);
  }

  const Json* json_;
  std::string path_;
  const std::string* where_;
  std::vector<std::string>* ignored_;
};

// What texts may look like.
bool is_file_name(std::string_view text);
bool is_identifier(std::string_view text);
bool is_dim_size(std::string_view text);  // `S` or `2*Rows`
bool is_entry_name(std::string_view text);
bool is_sha256(std::string_view text);

}  // namespace llama_runtime
