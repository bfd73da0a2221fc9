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

# Of a torch with CUDA, also these, where the toolkit's headers and runtime library are there too.
find_library(TORCH_CUDA_LIBRARY torch_cuda PATHS ${torch_root}/lib NO_DEFAULT_PATH)
if(TORCH_CUDA_LIBRARY)
  find_library(C10_CUDA_LIBRARY c10_cuda PATHS ${torch_root}/lib NO_DEFAULT_PATH REQUIRED)
  find_path(TORCH_CUDA_INCLUDE cuda_runtime_api.h PATHS /usr/local/cuda/include)
  find_library(CUDA_RUNTIME_LIBRARY cudart PATHS /usr/local/cuda/lib64)
  if(TORCH_CUDA_INCLUDE AND CUDA_RUNTIME_LIBRARY)
    set(TORCH_CUDA_LIBRARIES ${TORCH_CUDA_LIBRARY} ${C10_CUDA_LIBRARY} ${CUDA_RUNTIME_LIBRARY})
  else()
    set(TORCH_CUDA_INCLUDE "")
    message(STATUS "torch has CUDA, its toolkit is not found: programs run on the CPU alone")
  endif()
endif()
