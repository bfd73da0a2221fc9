#include "digests.h"

#include <algorithm>
#include <atomic>
#include <future>
#include <thread>
#include <vector>

#include "files.h"

namespace llama_runtime {
namespace {

namespace fs = std::filesystem;

std::optional<std::string> comparison(const std::string& actual, const std::string& expected) {
  if (actual == expected) return std::nullopt;
  return "sha256 " + actual.substr(0, 12) + "..., expected " + expected.substr(0, 12) + "...";
}

std::optional<std::string> block_difference(const fs::path& path, const File& file, size_t block) {
  const int64_t start = static_cast<int64_t>(block) * kBlockBytes;
  const bool is_last = block + 1 == file.blocks.size();
  // The last one goes on to the end of the file, so that what was appended is noticed.
  const auto end = is_last ? std::nullopt : std::optional<int64_t>(start + kBlockBytes);
  const auto text = comparison(sha256_file(path, start, end), file.blocks[block]);
  if (!text) return std::nullopt;
  constexpr int64_t kMebi = 1 << 20;
  const int64_t last = ((is_last ? file.bytes : *end) + kMebi - 1) / kMebi;
  return "bytes " + std::to_string(start / kMebi) + "-" + std::to_string(last) + " MiB: " + *text;
}

}  // namespace

std::optional<std::string> difference(const fs::path& path, const File& file) {
  if (file.blocks.empty()) return comparison(sha256_file(path), file.sha256);
  std::vector<std::optional<std::string>> texts(file.blocks.size());
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    for (size_t i = next++; i < texts.size(); i = next++) {
      texts[i] = block_difference(path, file, i);
    }
  };
  const size_t num_threads =
      std::clamp<size_t>(std::thread::hardware_concurrency(), 1, texts.size());
  std::vector<std::future<void>> threads;
  for (size_t i = 0; i < num_threads; ++i) threads.push_back(std::async(std::launch::async, work));
  for (auto& thread : threads) thread.get();
  const auto differs = [](const auto& text) { return text.has_value(); };
  const auto count = std::count_if(texts.begin(), texts.end(), differs);
  if (count == 0) return std::nullopt;
  const std::string first = **std::find_if(texts.begin(), texts.end(), differs);
  return count == 1 ? first : first + " (" + std::to_string(count) + " such blocks)";
}

}  // namespace llama_runtime
