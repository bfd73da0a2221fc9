// Generates sixteen tokens from a bundle: embed BUNDLE
#include <iostream>

#include "llama_runtime/error.h"
#include "llama_runtime/session.h"

int main(int argc, char** argv) {
  using namespace llama_runtime;
  if (argc != 2) {
    std::cerr << "usage: embed BUNDLE\n";
    return 2;
  }
  try {
    Model model(argv[1]);
    Session session(model);
    GenerateOptions options;
    options.max_new = 16;
    options.stop_tokens = model.manifest().stop_tokens;
    options.on_token = [](int32_t token) {
      std::cout << token << " " << std::flush;
      return true;
    };
    generate(session, {1, 10, 7}, options);
    std::cout << "\n";
  } catch (const Error& error) {
    std::cerr << "error: " << error.what() << "\nhint: " << error.hint() << "\n";
    return 1;
  }
}
