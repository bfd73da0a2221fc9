// Eight threads load the bundle and generate, all at once, and over one model; every text must be
// the one that a single thread gives. Arguments: BUNDLE
#include <iostream>
#include <thread>

#include "llama_runtime/session.h"

namespace {

using namespace llama_runtime;
using Tokens = std::vector<int32_t>;

Tokens text(Model& model, int32_t first) {
  Session session(model);
  GenerateOptions options;
  options.max_new = 24;
  options.sampling.temperature = 0.9;
  options.sampling.seed = static_cast<uint64_t>(first);
  return generate(session, {1, first, 7}, options).tokens;
}

}  // namespace

int main(int, char** argv) {
  constexpr int kThreads = 8;
  Model shared(argv[1], {.threads = 1, .allow_native = true, .weights_dir = {}});
  std::vector<Tokens> expected(kThreads), own(kThreads), common(kThreads);
  for (int i = 0; i < kThreads; ++i) expected[static_cast<size_t>(i)] = text(shared, 10 + i);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      Model model(argv[1]);
      own[static_cast<size_t>(i)] = text(model, 10 + i);
      common[static_cast<size_t>(i)] = text(shared, 10 + i);
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (own != expected || common != expected || expected[0] == expected[1]) {
    std::cerr << "threads changed what is generated\n";
    return 1;
  }
}
