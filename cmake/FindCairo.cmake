# SPDX-License-Identifier: Apache-2.0
# Finds cairo (Debian: libcairo2-dev), which ships no CMake package, and makes isoshard::cairo.
include(FindPackageHandleStandardArgs)
find_path(Cairo_INCLUDE_DIR cairo.h PATH_SUFFIXES cairo)
find_library(Cairo_LIBRARY cairo)
find_package_handle_standard_args(Cairo REQUIRED_VARS Cairo_LIBRARY Cairo_INCLUDE_DIR)
if(Cairo_FOUND AND NOT TARGET isoshard::cairo)
  add_library(isoshard::cairo INTERFACE IMPORTED GLOBAL)
  target_include_directories(isoshard::cairo SYSTEM INTERFACE ${Cairo_INCLUDE_DIR})
  target_link_libraries(isoshard::cairo INTERFACE ${Cairo_LIBRARY})
endif()
