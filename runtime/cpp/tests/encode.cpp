// Reads a JSON list of texts from stdin; writes for each its ids, and the text of these ids.
#include <iostream>
#include <nlohmann/json.hpp>

#include "llama_runtime/error.h"
#include "llama_runtime/tokenizer.h"

int main(int, char** argv) {
  try {
    const auto tokenizer = llama_runtime::Tokenizer::load(argv[1]);
    nlohmann::json results = nlohmann::json::array();
    for (const auto& text : nlohmann::json::parse(std::cin)) {
      const auto ids = tokenizer.encode(text.get_ref<const std::string&>());
      results.push_back({{"ids", ids}, {"text", tokenizer.decode(ids)}});
    }
    std::cout << results;
  } catch (const llama_runtime::Error& error) {
    std::cerr << llama_runtime::error_name(error.code()) << "\t" << error.what() << "\n";
    return 1;
  }
}
