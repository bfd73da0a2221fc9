// The one exception type of this library.
#pragma once

#include <stdexcept>
#include <string>

namespace llama_runtime {

// The kinds of known failures; each has the meaning of the Python class of the same name.
enum class ErrorCode {
  kManifest = 1,       // a manifest breaks the format
  kIntegrity = 2,      // a file is missing, damaged, or not what the manifest says
  kCompatibility = 3,  // the bundle is sound, but this machine or this build cannot run it
  kInput = 4,          // an argument does not fit; nothing was changed
  kSession = 5,        // a session is not in a state in which the call makes sense
  kTokenizer = 6,      // the tokenizer is missing, malformed or of a family that is not implemented
};

// The name of a kind, such as `ManifestError`.
const char* error_name(ErrorCode code);

// A known failure: what is wrong, where, and what to do next. `what()` is one line,
// `where: message`.
class Error : public std::runtime_error {
 public:
  // Where `hint` is empty, that of the kind is taken.
  Error(ErrorCode code, const std::string& message, const std::string& where = "",
        const std::string& hint = "");

  ErrorCode code() const { return code_; }
  const std::string& message() const { return message_; }
  // The file and, after `#`, the key path or tensor; or the argument. May be empty.
  const std::string& where() const { return where_; }
  const std::string& hint() const { return hint_; }

 private:
  ErrorCode code_;
  std::string message_;
  std::string where_;
  std::string hint_;
};

}  // namespace llama_runtime
