#include "llama_runtime/error.h"

namespace llama_runtime {
namespace {

const char* default_hint(ErrorCode code) {
  switch (code) {
    case ErrorCode::kManifest:
      return "build the bundle again with this version of llama-export";
    case ErrorCode::kIntegrity:
      return "copy the bundle again, or build it again";
    case ErrorCode::kCompatibility:
      return "build the bundle again for this machine";
    case ErrorCode::kInput:
      return "`llama-export inspect` shows what each entry takes";
    case ErrorCode::kSession:
      return "call reset(), or make a new session";
    case ErrorCode::kTokenizer:
      return "give token ids instead of text (--tokens)";
  }
  return "";
}

}  // namespace

const char* error_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::kManifest:
      return "ManifestError";
    case ErrorCode::kIntegrity:
      return "IntegrityError";
    case ErrorCode::kCompatibility:
      return "CompatibilityError";
    case ErrorCode::kInput:
      return "InputError";
    case ErrorCode::kSession:
      return "SessionError";
    case ErrorCode::kTokenizer:
      return "TokenizerError";
  }
  return "Error";
}

Error::Error(ErrorCode code, const std::string& message, const std::string& where,
             const std::string& hint)
    : std::runtime_error(where.empty() ? message : where + ": " + message),
      code_(code),
      message_(message),
      where_(where),
      hint_(hint.empty() ? default_hint(code) : hint) {}

}  // namespace llama_runtime
