# SPDX-License-Identifier: Apache-2.0
# Finds libxxhash (Debian: libxxhash-dev), which ships no CMake package, and makes isoshard::xxhash.
include(FindPackageHandleStandardArgs)
find_path(XxHash_INCLUDE_DIR xxhash.h)
find_library(XxHash_LIBRARY xxhash)
find_package_handle_standard_args(XxHash REQUIRED_VARS XxHash_LIBRARY XxHash_INCLUDE_DIR)
if(XxHash_FOUND AND NOT TARGET isoshard::xxhash)
  add_library(isoshard::xxhash INTERFACE IMPORTED GLOBAL)
  target_include_directories(isoshard::xxhash SYSTEM INTERFACE ${XxHash_INCLUDE_DIR})
  target_link_libraries(isoshard::xxhash INTERFACE ${XxHash_LIBRARY})
endif()
