# ONNX Runtime's C++ headers and its library. A release's own package file is asked first; Debian's
# and the releases' folders hold the same two things.
if(NOT OnnxRuntime_DIR)
  find_package(onnxruntime CONFIG QUIET)
endif()
if(onnxruntime_FOUND)
  get_target_property(ONNXRUNTIME_INCLUDE_DIR onnxruntime::onnxruntime INTERFACE_INCLUDE_DIRECTORIES)
  get_target_property(library onnxruntime::onnxruntime LOCATION)
  set(ONNXRUNTIME_LIBRARY ${library} CACHE FILEPATH "ONNX Runtime's library")
else()
  find_path(ONNXRUNTIME_INCLUDE_DIR onnxruntime_cxx_api.h HINTS ${OnnxRuntime_DIR}
            PATH_SUFFIXES include include/onnxruntime onnxruntime)
  find_library(ONNXRUNTIME_LIBRARY onnxruntime HINTS ${OnnxRuntime_DIR} PATH_SUFFIXES lib)
endif()
if(NOT ONNXRUNTIME_INCLUDE_DIR OR NOT ONNXRUNTIME_LIBRARY)
  message(FATAL_ERROR "no ONNX Runtime: pass -DOnnxRuntime_DIR=FOLDER, where FOLDER/include has "
                      "onnxruntime_cxx_api.h and FOLDER/lib has libonnxruntime.so")
endif()
get_filename_component(ONNXRUNTIME_LIBRARY_DIR ${ONNXRUNTIME_LIBRARY} DIRECTORY)
