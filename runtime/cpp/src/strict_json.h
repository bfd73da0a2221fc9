// JSON read strictly: one object, UTF-8, no duplicate keys, every complaint with its place.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "llama_runtime/error.h"

namespace llama_runtime {

struct Json;
struct Member;
using JsonList = std::vector<Json>;
using JsonObject = std::vector<Member>;
struct HugeInteger {};  // one beyond 64 bits; its reader refuses it by its key

struct Json {
  std::variant<std::nullptr_t, bool, int64_t, HugeInteger, double, std::string, JsonList,
               JsonObject>
      value;
};

struct Member {
  std::string key;
  Json value;
};

// One JSON object from bytes, of bounded size and depth. Throws Error of kind `code`, whose place
// is `where` or, for a value that no such object may hold, `where#key.path`.
JsonObject parse_object(std::string_view text, const std::string& where, ErrorCode code);

// The member of that name, or nullptr.
const Json* find(const JsonObject& object, std::string_view key);

// How JSON calls the type of a value, for messages.
const char* json_type(const Json& value);

// A scalar in backticks, anything else by its type.
std::string shown_value(const Json& value);

// The key path of a member.
std::string join(const std::string& path, std::string_view key);

}  // namespace llama_runtime
