# The library is shared and its headers need nothing else.
include("${CMAKE_CURRENT_LIST_DIR}/llama_runtimeTargets.cmake")
