// AOTInductor packages: native code, with the bundle's weights as its constants.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include "loaded_program.h"

namespace llama_runtime {

// Loads a package whose digest was checked. The constants' memory is used in place. Waits while
// another package is loaded anywhere in the process. Throws Error(kIntegrity): it is no package
// that this torch can load, or binds other constants. Leaves no files behind.
std::shared_ptr<LoadedProgram> load_aoti(const std::filesystem::path& path,
                                         const std::map<std::string, Tensor>& constants);

// Threads of every program of the process.
void set_num_threads(int count);

// The minor version of the torch that this library was built with, such as `2.13`.
std::string torch_minor();

}  // namespace llama_runtime
