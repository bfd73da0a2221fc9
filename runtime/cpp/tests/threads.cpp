// Eight threads load the bundle and generate, all at once, and over one model; every text must be
// the one that a single thread gives. Then one thread stops what another generates.
// Arguments: BUNDLE FORMAT
#include <chrono>
#include <future>
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

// Whether `stop` ends a generation that would go on for long, and nothing after it.
bool can_be_stopped(Model& model) {
  Session session(model);
  std::promise<void> begun;
  GenerateOptions options;
  options.max_new = 200;
  options.on_token = [&, count = 0](int32_t) mutable {
    if (++count == 3) begun.set_value();
    if (count == 3) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    return true;
  };
  std::thread other([&] {
    begun.get_future().wait();
    session.stop();
  });
  const Generated stopped = generate(session, {1, 10, 7}, options);
  other.join();
  session.reset();
  options.on_token = nullptr;
  options.max_new = 4;
  const Generated after = generate(session, {1, 10, 7}, options);
  return stopped.finish_reason == "cancelled" && stopped.tokens.size() == 3 &&
         after.tokens.size() == 4 && after.finish_reason == "length";
}

}  // namespace

int main(int, char** argv) {
  constexpr int kThreads = 8;
  LoadOptions load;
  load.threads = 1;
  load.format = argv[2];
  Model shared(argv[1], load);
  std::vector<Tokens> expected(kThreads), own(kThreads), common(kThreads);
  for (int i = 0; i < kThreads; ++i) expected[static_cast<size_t>(i)] = text(shared, 10 + i);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      Model model(argv[1], load);
      own[static_cast<size_t>(i)] = text(model, 10 + i);
      common[static_cast<size_t>(i)] = text(shared, 10 + i);
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (own != expected || common != expected || expected[0] == expected[1]) {
    std::cerr << "threads changed what is generated\n";
    return 1;
  }
  if (!can_be_stopped(shared)) {
    std::cerr << "a generation went on after it was stopped\n";
    return 1;
  }
}
