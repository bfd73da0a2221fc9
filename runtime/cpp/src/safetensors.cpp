#include "llama_runtime/safetensors.h"

#include <algorithm>
#include <cstring>

#include "files.h"
#include "llama_runtime/error.h"
#include "strict_json.h"
#include "text.h"

namespace llama_runtime {
namespace {

constexpr int64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr size_t kMaxDims = 8;

// What people have in place of weights, by how the file begins.
struct Impostor {
  const char* magic;
  const char* what;
  const char* hint;
};
constexpr Impostor kImpostors[] = {
    {"version https://git-lfs", "a Git LFS pointer", "fetch the data with `git lfs pull`"},
    {"<!doctype html", "an HTML page", "download the file itself, not the page that shows it"},
    {"<html", "an HTML page", "download the file itself, not the page that shows it"},
    {"PK\x03\x04", "a zip archive (PyTorch weights?)", "convert the weights to safetensors"},
    {"GGUF", "a GGUF file", "give it the suffix `.gguf` and name the file itself"},
};

[[noreturn]] void refuse(const std::string& message, const std::string& where,
                         const std::string& hint = "") {
  throw Error(ErrorCode::kIntegrity, message, where, hint);
}

void refuse_impostors(std::string_view data, const std::string& where) {
  const std::string_view prefix = data.substr(0, 64);
  const size_t first = prefix.find_first_not_of(" \t\n\r\f\v");
  std::string start(first == prefix.npos ? "" : prefix.substr(first));
  std::transform(start.begin(), start.end(), start.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const Impostor& impostor : kImpostors) {
    if (prefix.starts_with(impostor.magic) || start.starts_with(impostor.magic)) {
      refuse(std::string("expected a safetensors file, got ") + impostor.what, where,
             impostor.hint);
    }
  }
}

int64_t header_bytes(std::string_view data, const std::string& where) {
  const auto file_bytes = static_cast<int64_t>(data.size());
  if (file_bytes == 0) refuse("file is empty, 0 bytes (incomplete download?)", where);
  refuse_impostors(data, where);
  const std::string size = std::to_string(file_bytes);
  if (file_bytes <= kLengthBytes) {
    refuse("expected more than 8 bytes, got " + size + " (incomplete download?)", where);
  }
  uint64_t count = 0;
  for (int i = kLengthBytes - 1; i >= 0; --i) {
    count = count << 8 | static_cast<uint8_t>(data[static_cast<size_t>(i)]);
  }
  if (count > kMaxHeaderBytes) {
    refuse("expected a header of at most 100000000 bytes, got " + std::to_string(count), where,
           "this is not a safetensors file");
  }
  const int64_t missing = kLengthBytes + static_cast<int64_t>(count) - file_bytes;
  if (missing > 0) {
    refuse("file ends " + std::to_string(missing) + " bytes before its header of " +
               std::to_string(count) + " bytes does: it has " + size + " (incomplete download?)",
           where);
  }
  return static_cast<int64_t>(count);
}

std::vector<int64_t> read_sizes(const Json& value, const char* field, const std::string& where) {
  const auto* list = std::get_if<JsonList>(&value.value);
  if (list == nullptr || list->size() > kMaxDims) {
    refuse(std::string("expected ") + field + " as a list of at most 8 sizes", where);
  }
  std::vector<int64_t> sizes;
  for (const Json& item : *list) {
    const auto* size = std::get_if<int64_t>(&item.value);
    if (size == nullptr || *size < 0) {
      refuse(
          std::string("expected non-negative integers in ") + field + ", got " + shown_value(item),
          where);
    }
    sizes.push_back(*size);
  }
  return sizes;
}

void check_keys(const JsonObject& object, const std::string& where) {
  const bool is_right = object.size() == 3 && find(object, "dtype") && find(object, "shape") &&
                        find(object, "data_offsets");
  if (is_right) return;
  std::vector<std::string> keys;
  for (const Member& member : object) keys.push_back(member.key);
  std::sort(keys.begin(), keys.end());
  std::string got;
  for (size_t i = 0; i < keys.size() && i < 8; ++i) got += (i ? ", " : "") + shown(keys[i]);
  refuse("expected the keys dtype, shape and data_offsets, got " + (got.empty() ? "none" : got),
         where);
}

// Shape times dtype in bytes, refused where it overflows.
int64_t checked_bytes(const DTypeRow& row, const std::vector<int64_t>& shape,
                      const std::string& where) {
  int64_t num_bytes = row.num_bytes;
  bool is_over = false;
  for (const int64_t size : shape) {
    if (size == 0) return 0;
    is_over = is_over || __builtin_mul_overflow(num_bytes, size, &num_bytes);
  }
  if (is_over) {
    refuse("shape " + show(shape) + " of " + std::string(row.name) + " is larger than any file",
           where);
  }
  return num_bytes;
}

StoredTensor read_tensor(const Member& member, int64_t data_start, const std::string& where) {
  const auto* object = std::get_if<JsonObject>(&member.value.value);
  if (object == nullptr) {
    refuse(std::string("expected an object, got ") + json_type(member.value), where);
  }
  check_keys(*object, where);
  const Json& dtype = *find(*object, "dtype");
  const auto* spelling = std::get_if<std::string>(&dtype.value);
  const DTypeRow* row = spelling ? dtype_from_safetensors(*spelling) : nullptr;
  if (row == nullptr) refuse("dtype " + shown_value(dtype) + " is not supported", where);
  StoredTensor tensor{member.key, row->dtype, read_sizes(*find(*object, "shape"), "shape", where),
                      0, 0};
  const auto offsets = read_sizes(*find(*object, "data_offsets"), "data_offsets", where);
  if (offsets.size() != 2 || offsets[0] > offsets[1]) {
    refuse("expected data_offsets as [start, end] with start <= end, got " + show(offsets), where);
  }
  const int64_t expected = checked_bytes(*row, tensor.shape, where);
  if (offsets[1] - offsets[0] != expected) {
    refuse("shape " + show(tensor.shape) + " of " + std::string(row->name) + " needs " +
               std::to_string(expected) + " bytes, data_offsets give " +
               std::to_string(offsets[1] - offsets[0]),
           where);
  }
  if (__builtin_add_overflow(data_start, offsets[0], &tensor.start) ||
      __builtin_add_overflow(data_start, offsets[1], &tensor.end)) {
    refuse("data_offsets " + show(offsets) + " are beyond any file", where);
  }
  return tensor;
}

std::map<std::string, std::string> read_metadata(const Json& value, const std::string& where) {
  std::map<std::string, std::string> metadata;
  if (value.value.index() == 0) return metadata;
  const auto* object = std::get_if<JsonObject>(&value.value);
  if (object == nullptr) {
    refuse(std::string("expected an object of strings, got ") + json_type(value), where);
  }
  for (const Member& member : *object) {
    const auto* text = std::get_if<std::string>(&member.value.value);
    if (text == nullptr) {
      refuse("expected a string for " + shown(member.key) + ", got " + json_type(member.value),
             where);
    }
    metadata[member.key] = *text;
  }
  return metadata;
}

void check_extents(SafetensorsHeader& header, const std::string& where) {
  std::stable_sort(header.tensors.begin(), header.tensors.end(),
                   [](const StoredTensor& a, const StoredTensor& b) {
                     return std::pair(a.start, a.end) < std::pair(b.start, b.end);
                   });
  int64_t end = header.data_start;
  std::string previous = "the header";
  for (const StoredTensor& tensor : header.tensors) {
    const std::string place = where + "#" + printable(tensor.name);
    if (tensor.start < end) {
      refuse("overlaps " + shown(previous) + " by " + std::to_string(end - tensor.start) + " bytes",
             place);
    }
    if (tensor.start > end) {
      refuse(std::to_string(tensor.start - end) + " bytes between " + shown(previous) +
                 " and this belong to no tensor",
             place);
    }
    end = tensor.end;
    previous = tensor.name;
  }
  header.data_end = end;
}

void check_size(int64_t data_end, int64_t file_bytes, const std::string& where) {
  if (data_end == file_bytes) return;
  const std::string counts =
      ": expected " + std::to_string(data_end) + " bytes, got " + std::to_string(file_bytes);
  const std::string change = data_end > file_bytes
                                 ? std::to_string(data_end - file_bytes) + " bytes shorter"
                                 : std::to_string(file_bytes - data_end) + " bytes longer";
  refuse("file is " + change + " than its header declares" +
             (data_end > file_bytes ? " (incomplete download?)" : "") + counts,
         where, "download the file again");
}

Tensor view(const Map& map, const StoredTensor& stored) {
  Tensor tensor{stored.dtype, stored.shape, nullptr};
  if (stored.start == stored.end) return tensor;
  const uint8_t* bytes = map.data.get() + stored.start;
  if (stored.start % dtype_row(stored.dtype).num_bytes == 0) {
    // Native code wants a plain pointer; the pages themselves are read-only.
    tensor.data = std::shared_ptr<void>(map.data, const_cast<uint8_t*>(bytes));
  } else {
    tensor = Tensor::zeros(stored.dtype, stored.shape);
    std::memcpy(tensor.data.get(), bytes, static_cast<size_t>(stored.end - stored.start));
  }
  return tensor;
}

}  // namespace

SafetensorsHeader parse_safetensors(std::string_view data, const std::string& where) {
  const int64_t count = header_bytes(data, where);
  const std::string_view text = data.substr(kLengthBytes, static_cast<size_t>(count));
  if (!text.starts_with("{")) refuse("expected a header that begins with `{`", where);
  SafetensorsHeader header;
  header.data_start = kLengthBytes + count;
  const JsonObject fields = parse_object(text, where, ErrorCode::kIntegrity);
  if (const Json* metadata = find(fields, "__metadata__")) {
    header.metadata = read_metadata(*metadata, where + "#__metadata__");
  }
  for (const Member& member : fields) {
    if (member.key == "__metadata__") continue;
    header.tensors.push_back(
        read_tensor(member, header.data_start, where + "#" + printable(member.key)));
  }
  check_extents(header, where);
  check_size(header.data_end, static_cast<int64_t>(data.size()), where);
  return header;
}

MappedWeights map_safetensors(const std::filesystem::path& path) {
  const Map map = map_file(path);
  const std::string_view data(reinterpret_cast<const char*>(map.data.get()),
                              static_cast<size_t>(map.num_bytes));
  MappedWeights weights;
  weights.header = parse_safetensors(data, path.string());
  weights.header_sha256 =
      sha256_text(data.substr(0, static_cast<size_t>(weights.header.data_start)));
  for (const StoredTensor& stored : weights.header.tensors) {
    weights.tensors[stored.name] = view(map, stored);
  }
  return weights;
}

}  // namespace llama_runtime
