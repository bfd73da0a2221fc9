# libtorch's headers and libraries. Torch's own package file would ask for a CUDA toolkit wherever
# torch was built with one; programs for the CPU need none.
if(NOT Torch_DIR)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -c
      "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE torch_root OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_QUIET)
  if(failed)
    message(FATAL_ERROR "no torch: `${Python3_EXECUTABLE} -m pip install torch`, or pass "
                        "-DTorch_DIR=.../share/cmake/Torch")
  endif()
else()
  get_filename_component(torch_root "${Torch_DIR}/../../.." ABSOLUTE)
endif()
find_path(TORCH_INCLUDE torch/headeronly/version.h PATHS ${torch_root}/include NO_DEFAULT_PATH
          REQUIRED)
find_library(TORCH_LIBRARY torch PATHS ${torch_root}/lib NO_DEFAULT_PATH REQUIRED)
find_library(TORCH_CPU_LIBRARY torch_cpu PATHS ${torch_root}/lib NO_DEFAULT_PATH REQUIRED)
find_library(C10_LIBRARY c10 PATHS ${torch_root}/lib NO_DEFAULT_PATH REQUIRED)
set(TORCH_LIBRARY_DIR ${torch_root}/lib)
