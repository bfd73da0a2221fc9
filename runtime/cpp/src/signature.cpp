#include <set>

#include "llama_runtime/manifest.h"
#include "manifest_parts.h"
#include "text.h"

namespace llama_runtime {
namespace {

bool is_name(std::string_view text) {
  return !text.empty();
}

Dim read_dim(const Node& node) {
  node.keys({"name", "min", "max"});
  Dim dim;
  dim.name = node.field("name").text(is_identifier, "an identifier");
  dim.min = node.field("min").at_least(1);
  dim.max = node.field("max").at_least(1);
  if (dim.min > dim.max) {
    node.fail("expected min <= max for `" + dim.name + "`, got " + std::to_string(dim.min) + ", " +
              std::to_string(dim.max));
  }
  return dim;
}

std::optional<std::string> read_dim_name(const std::optional<Node>& node) {
  if (!node || node->is_null()) return std::nullopt;
  return node->text(is_identifier, "an identifier");
}

Bounds read_bounds(const Node& node) {
  node.keys({"min", "max", "span", "dim", "scale", "offset"});
  Bounds bounds;
  bounds.min = node.field("min").at_least(-1);
  bounds.max = node.field("max").integer();
  bounds.span = read_dim_name(node.optional("span"));
  bounds.dim = read_dim_name(node.optional("dim"));
  if (const auto scale = node.optional("scale")) bounds.scale = scale->at_least(1);
  if (const auto offset = node.optional("offset")) bounds.offset = offset->integer();
  if (bounds.min > bounds.max) {
    node.fail("expected min <= max, got " + std::to_string(bounds.min) + ", " +
              std::to_string(bounds.max));
  }
  return bounds;
}

std::vector<Size> read_shape(const Node& node) {
  std::vector<Size> shape;
  for (const Node& item : node.items()) {
    if (item.is_integer()) {
      shape.emplace_back(item.at_least(1));
    } else if (item.is_text()) {
      shape.emplace_back(item.text(is_dim_size, "a dimension such as `S`"));
    } else {
      item.fail(std::string("expected an integer or a string, got ") + item.type());
    }
  }
  if (shape.size() > 8) {
    node.fail("expected at most 8 items, got " + std::to_string(shape.size()));
  }
  return shape;
}

TensorSpec read_spec(const Node& node, bool has_values) {
  has_values ? node.keys({"name", "dtype", "shape", "values"})
             : node.keys({"name", "dtype", "shape"});
  TensorSpec spec;
  spec.name = node.field("name").text(is_name, "a name");
  spec.dtype = node.field("dtype").dtype();
  spec.shape = read_shape(node.field("shape"));
  if (const auto values = node.optional("values"); values && !values->is_null()) {
    spec.values = read_bounds(*values);
  }
  int64_t num_bytes = dtype_row(spec.dtype).num_bytes;
  for (const Size& size : spec.shape) {
    const auto* number = std::get_if<int64_t>(&size);
    if (number && __builtin_mul_overflow(num_bytes, *number, &num_bytes)) {
      node.fail("`" + spec.name + "` of shape " + show(spec.shape) + " is larger than any memory");
    }
  }
  return spec;
}

void check_distinct(const Node& node, const char* kind, const std::vector<std::string>& names) {
  std::multiset<std::string_view> seen(names.begin(), names.end());
  for (const std::string& name : names) {
    if (seen.count(name) > 1) {
      node.fail(std::string("expected distinct ") + kind + " names, got " + shown(name) + " twice");
    }
  }
}

// Every use of a dimension, with the name of the tensor that uses it.
using Uses = std::vector<std::pair<std::string, std::string>>;

Uses called_dims(const Signature& signature) {
  Uses uses;
  for (const auto* specs : {&signature.inputs, &signature.states}) {
    for (const TensorSpec& spec : *specs) {
      for (const Size& size : spec.shape) {
        if (const auto* name = std::get_if<std::string>(&size)) uses.emplace_back(spec.name, *name);
      }
    }
  }
  return uses;
}

void check_dims(const Node& node, const Signature& signature) {
  Uses uses = called_dims(signature);
  std::set<std::string> bound, known;
  for (const auto& [spec, dim] : uses) bound.insert(dim);
  for (const Dim& dim : signature.dims) known.insert(dim.name);
  for (const auto* specs : {&signature.inputs, &signature.outputs}) {
    for (const TensorSpec& spec : *specs) {
      if (!spec.values) continue;
      if (spec.values->span) uses.emplace_back(spec.name, *spec.values->span);
      if (spec.values->dim) uses.emplace_back(spec.name, *spec.values->dim);
    }
  }
  for (const TensorSpec& spec : signature.outputs) {
    for (const Size& size : spec.shape) {
      const auto* name = std::get_if<std::string>(&size);
      if (name) uses.emplace_back(spec.name, parts(*name).second);
    }
  }
  for (const auto& [spec, dim] : uses) {
    if (!known.contains(dim)) {
      node.fail("`" + spec + "` has the undeclared dimension " + shown(dim));
    }
    if (!bound.contains(dim))
      node.fail("`" + spec + "` has the dimension `" + dim + "` of no input");
  }
}

}  // namespace

Signature read_signature(const Node& node) {
  node.keys({"inputs", "states", "outputs", "dims"});
  Signature signature;
  std::vector<std::string> called, outputs, dims;
  for (const Node& item : node.field("inputs").items()) {
    signature.inputs.push_back(read_spec(item, true));
    called.push_back(signature.inputs.back().name);
  }
  for (const Node& item : node.field("states").items()) {
    signature.states.push_back(read_spec(item, false));
    called.push_back(signature.states.back().name);
  }
  for (const Node& item : node.field("outputs").items()) {
    signature.outputs.push_back(read_spec(item, true));
    outputs.push_back(signature.outputs.back().name);
  }
  for (const Node& item : node.field("dims").items()) {
    signature.dims.push_back(read_dim(item));
    dims.push_back(signature.dims.back().name);
  }
  check_distinct(node, "input or state", called);
  check_distinct(node, "output", outputs);
  check_distinct(node, "dimension", dims);
  if (outputs.empty()) node.fail("expected at least one output");
  check_dims(node, signature);
  return signature;
}

const Dim* Signature::dim(std::string_view name) const {
  for (const Dim& dim : dims) {
    if (dim.name == name) return &dim;
  }
  return nullptr;
}

std::pair<int64_t, std::string> parts(const std::string& size) {
  const size_t star = size.find('*');
  if (star == size.npos) return {1, size};
  return {std::stoll(size.substr(0, star)), size.substr(star + 1)};
}

std::vector<int64_t> resolve(const std::vector<Size>& shape, const Sizes& sizes) {
  std::vector<int64_t> resolved;
  for (const Size& size : shape) {
    if (const auto* number = std::get_if<int64_t>(&size)) {
      resolved.push_back(*number);
    } else {
      const auto [factor, name] = parts(std::get<std::string>(size));
      resolved.push_back(factor * sizes.at(name));
    }
  }
  return resolved;
}

std::string show(const std::vector<Size>& shape) {
  std::string text = "[";
  for (const Size& size : shape) {
    const auto* number = std::get_if<int64_t>(&size);
    text += (text.size() > 1 ? ", " : "") +
            (number ? std::to_string(*number) : std::get<std::string>(size));
  }
  return text + "]";
}

}  // namespace llama_runtime
