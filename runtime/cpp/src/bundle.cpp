#include "llama_runtime/bundle.h"

#include <algorithm>
#include <optional>
#include <set>

#include "digests.h"
#include "files.h"
#include "llama_runtime/error.h"
#include "text.h"

namespace llama_runtime {
namespace {

namespace fs = std::filesystem;
constexpr const char* kIndexMessage = "its header is not the one that the programs were built for";

Error damage(const std::string& message, const fs::path& path, const char* hint = "") {
  return Error(ErrorCode::kIntegrity, message, path.string(), hint);
}

// Why a file is not a plain one of the listed size inside the bundle, if so.
std::optional<Error> misfit(const fs::path& path, const File& file) {
  const Status status = file_status(path);
  if (status.error) {
    std::error_code ignored;
    const bool is_link = fs::is_symlink(path, ignored);
    return damage("missing: " + (is_link ? "dangling symlink" : os_text(status.error)), path);
  }
  if (!status.is_plain) return damage("expected a plain file", path);
  if (leads_out(path)) return damage("expected no link out of the bundle", path, kLinkHint);
  if (status.num_bytes != file.bytes) {
    return damage(
        "damaged: " + with_commas(status.num_bytes) + " bytes, expected " + with_commas(file.bytes),
        path);
  }
  return std::nullopt;
}

void check_index(const Bundle& bundle) {
  std::set<std::string> found;
  for (const auto& [name, digest] : bundle.manifest.weights_headers) {
    if (bundle.manifest.referenced.contains(name)) continue;
    const MappedWeights weights = map_safetensors(bundle.path(name));
    if (weights.header_sha256 != digest) throw damage(kIndexMessage, bundle.path(name));
    for (const auto& [tensor, data] : weights.tensors) found.insert(tensor);
  }
  if (!bundle.manifest.referenced.empty() || bundle.manifest.weights == "none") return;
  for (const ProgramRecord& program : bundle.manifest.programs) {
    for (const std::string& name : program.constants) {
      if (found.contains(name)) continue;
      const std::string message =
          "expected " + shown(name) + ", which `" + program.file + "` binds, found none";
      throw damage(message, bundle.path(kWeightsName));
    }
  }
}

std::optional<Error> content_fault(const Bundle& bundle, const std::string& name) {
  const File& file = *bundle.manifest.file(name);
  if (auto fault = misfit(bundle.path(name), file)) return fault;
  if (const auto text = difference(bundle.path(name), file)) {
    return damage("changed: " + *text, bundle.path(name));
  }
  return std::nullopt;
}

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  std::error_code error;
  for (const auto& item : fs::directory_iterator(folder, error)) {
    names.insert(item.path().filename().string());
  }
  if (error) throw damage("cannot be read: " + error.message(), folder);
  return names;
}

void check_referenced(const fs::path& path, const File& file) {
  const char* hint = "name the folder of the very checkpoint that the bundle was built from";
  const Status status = file_status(path);
  if (status.error || !status.is_plain) {
    throw Error(ErrorCode::kCompatibility,
                "not there, but the bundle's weights are in a file of this name", path.string(),
                "name the checkpoint's folder");
  }
  if (status.num_bytes != file.bytes) {
    throw damage(with_commas(status.num_bytes) + " bytes, the bundle was built from " +
                     with_commas(file.bytes),
                 path, hint);
  }
  if (const auto text = difference(path, file)) {
    throw damage("not what the bundle was built from: " + *text, path, hint);
  }
}

fs::path place_of(const Bundle& bundle, const std::string& name, const fs::path& weights_dir) {
  const auto referenced = bundle.manifest.referenced.find(name);
  if (referenced == bundle.manifest.referenced.end()) return bundle.path(name);
  if (weights_dir.empty()) {
    throw Error(ErrorCode::kCompatibility,
                "the weights are not in the bundle: they are " + shown(name) +
                    " of the checkpoint " + shown(bundle.manifest.source.name),
                bundle.folder.string(), "name the checkpoint's folder (--weights-dir)");
  }
  check_referenced(weights_dir / name, referenced->second);
  return weights_dir / name;
}

}  // namespace

Bundle open_bundle(const fs::path& folder) {
  Bundle bundle{folder, read_manifest(folder)};
  for (const auto& [name, file] : bundle.manifest.files) {
    if (const auto fault = misfit(bundle.path(name), file)) throw *fault;
  }
  return bundle;
}

void check_digest(const Bundle& bundle, const std::string& name) {
  if (const auto text = difference(bundle.path(name), *bundle.manifest.file(name))) {
    throw damage("damaged: " + *text, bundle.path(name));
  }
}

void check_integrity(const Bundle& bundle) {
  check_index(bundle);
  std::set<std::string> names = names_in(bundle.folder);
  for (const auto& [name, file] : bundle.manifest.files) names.insert(name);
  for (const std::string& name : names) {
    if (name == kManifestName || name == kSignatureName) continue;
    if (!bundle.manifest.file(name)) {
      throw damage("extra: not listed in the manifest", bundle.path(printable(name)));
    }
    if (const auto fault = content_fault(bundle, name)) throw *fault;
  }
}

std::map<std::string, Tensor> map_weights(const Bundle& bundle, const fs::path& weights_dir) {
  if (bundle.manifest.weights == "none") {
    throw Error(ErrorCode::kCompatibility, "the bundle holds programs without weights",
                bundle.folder.string(), "build it with --weights copy to run it");
  }
  std::map<std::string, Tensor> own, weights;
  for (const auto& [name, digest] : bundle.manifest.weights_headers) {
    const fs::path path = place_of(bundle, name, weights_dir);
    MappedWeights found = map_safetensors(path);
    if (found.header_sha256 != digest) throw damage(kIndexMessage, path);
    if (name == kWeightsName) {
      own = std::move(found.tensors);
      continue;
    }
    for (auto& [tensor, data] : found.tensors) {
      if (!weights.emplace(tensor, std::move(data)).second) {
        throw damage("holds " + shown(tensor) + ", as another file does", path);
      }
    }
  }
  for (auto& [tensor, data] : own) weights.insert_or_assign(tensor, std::move(data));
  return weights;
}

}  // namespace llama_runtime
