#include <algorithm>
#include <nlohmann/json.hpp>

#include "files.h"
#include "llama_runtime/error.h"
#include "text.h"
#include "tokenizer_tables.h"

namespace llama_runtime {
namespace {

using Value = nlohmann::json;

// What a ByteLevel step cuts at.
constexpr const char* kWords =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

class Reader {
 public:
  explicit Reader(std::string where) : where_(std::move(where)) {}

  std::shared_ptr<Tokenizer::Tables> read(const Value& file) {
    require(file.value("normalizer", Value()).is_null(), "normalizer", "none");
    const Value& model = file.at("model");
    require(model.value("type", "BPE") == "BPE", "model.type", "BPE");
    for (const char* key :
         {"unk_token", "continuing_subword_prefix", "end_of_word_suffix", "dropout"}) {
      const Value value = model.value(key, Value());
      require(value.is_null() || value == "", std::string("model.") + key, "none");
    }
    require(!model.value("byte_fallback", false), "model.byte_fallback", "false");
    tables_->ignores_merges = model.value("ignore_merges", false);
    const Value& decoder = file.at("decoder");
    require(decoder.is_object() && decoder.at("type") == "ByteLevel", "decoder", "ByteLevel");
    read_vocab(model.at("vocab"));
    read_merges(model.at("merges"));
    read_added(file.value("added_tokens", Value::array()));
    read_pre_tokenizer(file.at("pre_tokenizer"), "pre_tokenizer");
    require(is_byte_level_, "pre_tokenizer", "one that ends in ByteLevel");
    read_post_processor(file.value("post_processor", Value()), "post_processor");
    return tables_;
  }

 private:
  void require(bool is_good, const std::string& key, const char* expected) const {
    if (is_good) return;
    throw Error(ErrorCode::kTokenizer,
                std::string("expected ") + expected + "; what this one declares is not implemented",
                where_ + "#" + key);
  }

  // The bytes that the file's characters stand for; text of added tokens stands for itself.
  static std::string bytes_of(const std::string& token) {
    std::string bytes;
    for (size_t i = 0; i < token.size();) {
      const int byte = byte_of(next_char(token, i));
      if (byte < 0) return token;
      bytes += static_cast<char>(byte);
    }
    return bytes;
  }

  // Byte-level vocabularies write printable bytes as themselves, the others from U+0100 on.
  static int byte_of(char32_t c) {
    const auto is_plain = [](char32_t b) {
      return (b >= 0x21 && b < 0x7F) || (b >= 0xA1 && b < 0xAD) || (b >= 0xAE && b < 0x100);
    };
    if (is_plain(c)) return static_cast<int>(c);
    char32_t other = 0x100;
    for (char32_t byte = 0; c >= 0x100 && byte < 0x100; ++byte) {
      if (!is_plain(byte) && other++ == c) return static_cast<int>(byte);
    }
    return -1;
  }

  void read_vocab(const Value& vocab) {
    tables_->byte_ids.fill(-1);
    for (const auto& [token, id] : vocab.get_ref<const Value::object_t&>()) {
      const std::string bytes = bytes_of(token);
      tables_->vocab.emplace(bytes, id.get<int32_t>());
      tables_->bytes_of.emplace(id.get<int32_t>(), bytes);
      if (bytes.size() == 1 && num_chars(token) == 1) {
        tables_->byte_ids[static_cast<uint8_t>(bytes[0])] = id.get<int32_t>();
      }
    }
  }

  int32_t id_of(const std::string& token) const {
    const auto found = tables_->vocab.find(bytes_of(token));
    if (found != tables_->vocab.end()) return found->second;
    throw Error(ErrorCode::kTokenizer, "expected " + shown(token) + " in the vocabulary",
                where_ + "#model.merges");
  }

  void read_merges(const Value& merges) {
    int32_t rank = 0;
    for (const Value& merge : merges) {
      std::string first, second;
      if (merge.is_string()) {  // as older files write them
        const auto& text = merge.get_ref<const std::string&>();
        first = text.substr(0, text.find(' '));
        second = text.substr(std::min(text.size(), first.size() + 1));
      } else {
        first = merge.at(0).get<std::string>();
        second = merge.at(1).get<std::string>();
      }
      tables_->merges.insert_or_assign(pair_key(id_of(first), id_of(second)),
                                       Merge{rank++, id_of(first + second)});
    }
  }

  void read_added(const Value& tokens) {
    for (const Value& token : tokens) {
      for (const char* key : {"single_word", "lstrip", "rstrip"}) {
        require(!token.value(key, false), "added_tokens", "plain ones");
      }
      const auto text = token.at("content").get<std::string>();
      const auto id = token.at("id").get<int32_t>();
      if (text.empty()) continue;
      const bool is_special = token.value("special", false);
      tables_->added[token.value("normalized", !is_special) ? 1 : 0].push_back({text, id});
      tables_->bytes_of.insert_or_assign(id, bytes_of(text));
      if (is_special) tables_->special.insert(id);
    }
    for (auto& added : tables_->added) {
      std::stable_sort(added.begin(), added.end(), [](const AddedToken& a, const AddedToken& b) {
        return a.text.size() > b.text.size();
      });
    }
  }

  void add_step(const char* pattern, const std::string& key, bool adds_prefix_space = false) {
    PreTokenizer step{nullptr, adds_prefix_space};
    if (pattern) step.splitter = std::make_shared<Splitter>(pattern, where_ + "#" + key);
    tables_->pre_tokenizers.push_back(std::move(step));
  }

  void read_pre_tokenizer(const Value& step, const std::string& key) {
    require(step.is_object(), key, "ByteLevel");
    const auto type = step.at("type").get<std::string>();
    if (type == "Sequence") {
      for (const Value& part : step.at("pretokenizers")) read_pre_tokenizer(part, key);
      return;
    }
    require(!is_byte_level_, key, "ByteLevel as the last step");
    if (type == "ByteLevel") {
      const bool has_regex = step.value("use_regex", true);
      add_step(has_regex ? kWords : nullptr, key, step.value("add_prefix_space", true));
      is_byte_level_ = true;
    } else if (type == "Digits") {
      add_step(step.value("individual_digits", false) ? R"(\p{N})" : R"(\p{N}+)", key);
    } else {
      require(type == "Split" && step.at("behavior") == "Isolated" &&
                  !step.value("invert", false) && step.at("pattern").contains("Regex"),
              key, "ByteLevel, Digits or a Split that isolates a regular expression");
      add_step(step.at("pattern").at("Regex").get_ref<const std::string&>().c_str(), key);
    }
  }

  void read_post_processor(const Value& step, const std::string& key) {
    if (step.is_null()) return;
    const auto type = step.at("type").get<std::string>();
    if (type == "Sequence") {
      for (const Value& part : step.at("processors")) read_post_processor(part, key);
      return;
    }
    if (type == "ByteLevel") return;  // it moves offsets, not ids
    require(type == "TemplateProcessing", key, "TemplateProcessing or ByteLevel");
    std::vector<int32_t> prefix, suffix;
    bool is_past_text = false;
    for (const Value& item : step.at("single")) {
      is_past_text = is_past_text || item.contains("Sequence");
      if (!item.contains("SpecialToken")) continue;
      const auto name = item.at("SpecialToken").at("id").get<std::string>();
      for (const Value& id : step.at("special_tokens").at(name).at("ids")) {
        (is_past_text ? suffix : prefix).push_back(id.get<int32_t>());
      }
    }
    tables_->prefix.insert(tables_->prefix.begin(), prefix.begin(), prefix.end());
    tables_->suffix.insert(tables_->suffix.end(), suffix.begin(), suffix.end());
  }

  std::string where_;
  std::shared_ptr<Tokenizer::Tables> tables_ = std::make_shared<Tokenizer::Tables>();
  bool is_byte_level_ = false;
};

}  // namespace

Tokenizer Tokenizer::load(const std::filesystem::path& path) {
  const std::string text = read_bytes(path, ErrorCode::kTokenizer);
  try {
    return Tokenizer(Reader(path.string()).read(Value::parse(text)));
  } catch (const Value::exception& cause) {
    throw Error(ErrorCode::kTokenizer,
                "expected a tokenizer, got: " + printable(std::string(cause.what()).substr(0, 200)),
                path.string(), "fetch the file again, or give token ids instead of text");
  }
}

}  // namespace llama_runtime
