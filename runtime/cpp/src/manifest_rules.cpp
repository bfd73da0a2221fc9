#include <algorithm>
#include <set>
#include <tuple>

#include "manifest_parts.h"
#include "text.h"

namespace llama_runtime {
namespace {

void check_unlisted(const Node& node, const char* key, const std::string& name) {
  for (const char* unlisted : {kManifestName, kSignatureName}) {
    if (name == unlisted) {
      node.fail("`" + name + "` is listed in `" + key + "`, which is made before it");
    }
  }
}

void check_variants(const Node& node, const Manifest& manifest) {
  const auto kind = [](const ProgramRecord& program) {
    return std::tuple(program.entry, program.format, program.shards);
  };
  std::set<std::tuple<std::string, std::string, int64_t>> general;
  for (const ProgramRecord& program : manifest.programs) {
    if (program.variant.empty()) general.insert(kind(program));
  }
  for (const ProgramRecord& program : manifest.programs) {
    if (!program.variant.empty() && !general.contains(kind(program))) {
      const std::string shards =
          program.shards == 1 ? "" : " of " + std::to_string(program.shards) + " shards";
      node.fail("variant " + shown(program.label() + shards) + " in " + program.format +
                " has no general program");
    }
  }
}

void check_cuts(const Node& node, const Manifest& manifest) {
  const bool is_sharded =
      std::any_of(manifest.programs.begin(), manifest.programs.end(),
                  [](const ProgramRecord& program) { return program.shards > 1; });
  if (is_sharded == manifest.cuts.empty()) {
    node.fail(std::string("`cuts` are for programs of several shards, but ") +
              (is_sharded ? "`cuts` is empty" : "there is none"));
  }
}

// What the mode of the weights says of the files that hold them.
bool is_right(const Manifest& manifest) {
  const auto& held = manifest.weights_headers;
  const bool has_references = !manifest.referenced.empty();
  if (manifest.weights == "copy") {
    return held.size() == 1 && held.contains(kWeightsName) && !has_references;
  }
  if (manifest.weights == "link") return !held.empty() && !has_references;
  return manifest.weights == "reference" ? has_references : held.empty() && !has_references;
}

}  // namespace

void check_files(const Node& node, const Manifest& manifest) {
  for (const char* unlisted : {kManifestName, kSignatureName}) {
    if (manifest.file(unlisted)) check_unlisted(node, "files", unlisted);
  }
  for (const auto& [name, file] : manifest.referenced) check_unlisted(node, "referenced", name);
  for (const ProgramRecord& program : manifest.programs) {
    if (!manifest.file(program.file)) {
      node.fail("program file " + shown(program.file) + " is not listed in `files`");
    }
  }
  check_variants(node, manifest);
  check_cuts(node, manifest);
  if (manifest.tokenizer && !manifest.file(kTokenizerName)) {
    node.fail("`tokenizer.json` is not listed in `files`");
  }
  if (manifest.has_chat_template && !manifest.file("chat_template.jinja")) {
    node.fail("`chat_template.jinja` is not listed in `files`");
  }
}

void check_weights(const Node& node, const Manifest& manifest) {
  for (const auto& [name, file] : manifest.referenced) {
    if (manifest.file(name)) node.fail(shown(name) + " is in `files` and in `referenced`");
  }
  for (const auto& [name, file] : manifest.referenced) {
    if (!manifest.weights_headers.contains(name)) {
      node.fail("weights file " + shown(name) + " is not listed in `weights_headers`");
    }
  }
  std::string listed;
  for (const auto& [name, digest] : manifest.weights_headers) {
    if (!manifest.referenced.contains(name) && !manifest.file(name)) {
      node.fail("weights file " + shown(name) + " is not listed in `files`");
    }
    listed += (listed.empty() ? "" : ", ") + shown(name);
  }
  if (!is_right(manifest)) {
    node.fail("weights `" + manifest.weights +
              "` cannot have these weights files: " + (listed.empty() ? "none" : listed));
  }
}

}  // namespace llama_runtime
