# SPDX-License-Identifier: Apache-2.0
# Finds toml++ (Debian: libtomlplusplus-dev), whose headers need no library, and makes
# isoshard::tomlplusplus.
include(FindPackageHandleStandardArgs)
find_path(TomlPlusPlus_INCLUDE_DIR toml++/toml.h)
find_package_handle_standard_args(TomlPlusPlus REQUIRED_VARS TomlPlusPlus_INCLUDE_DIR)
if(TomlPlusPlus_FOUND AND NOT TARGET isoshard::tomlplusplus)
  add_library(isoshard::tomlplusplus INTERFACE IMPORTED GLOBAL)
  target_include_directories(isoshard::tomlplusplus SYSTEM INTERFACE ${TomlPlusPlus_INCLUDE_DIR})
endif()
