// Prints what is wrong with each bundle that is named on a line of stdin: kind, tab, line; or `ok`.
#include <iostream>

#include "llama_runtime/bundle.h"
#include "llama_runtime/error.h"

int main() {
  using namespace llama_runtime;
  for (std::string folder; std::getline(std::cin, folder);) {
    try {
      check_integrity(open_bundle(folder));
      std::cout << "ok\n";
    } catch (const Error& error) {
      std::cout << error_name(error.code()) << "\t" << error.what() << "\n";
    }
  }
}
