// Reads a JSON list of [stop texts, pieces of text] from stdin; writes for each the pieces that are
// passed on, the last one at the end, and the stop text that was found or null.
#include "llama_runtime/stop.h"

#include <iostream>
#include <nlohmann/json.hpp>

int main() {
  nlohmann::json results = nlohmann::json::array();
  for (const auto& item : nlohmann::json::parse(std::cin)) {
    llama_runtime::StopTexts stops(item[0].get<std::vector<std::string>>());
    nlohmann::json pieces = nlohmann::json::array();
    for (const auto& piece : item[1]) pieces.push_back(stops.push(piece.get<std::string>()));
    pieces.push_back(stops.finish());
    results.push_back({pieces, stops.matched() ? nlohmann::json(*stops.matched()) : nullptr});
  }
  std::cout << results;
}
