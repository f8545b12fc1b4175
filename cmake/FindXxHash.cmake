# SPDX-License-Identifier: Apache-2.0
# Finds libxxhash (Debian: libxxhash-dev), which ships no CMake package, and makes isoshard::xxhash.
include(FindPackageHandleStandardArgs)
find_path(XxHash_INCLUDE_DIR xxhash.h)
find_library(XxHash_LIBRARY xxhash)
find_package_handle_standard_args(XxHash REQUIRED_VARS XxHash_LIBRARY XxHash_INCLUDE_DIR)
if(XxHash_FOUND AND NOT TARGET isoshard_xxhash)
  add_library(isoshard_xxhash INTERFACE)
  add_library(isoshard::xxhash ALIAS isoshard_xxhash)
  target_include_directories(isoshard_xxhash SYSTEM INTERFACE ${XxHash_INCLUDE_DIR})
  target_link_libraries(isoshard_xxhash INTERFACE ${XxHash_LIBRARY})
endif()
