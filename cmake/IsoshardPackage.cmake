# SPDX-License-Identifier: Apache-2.0
# `cpack -G DEB` in the build folder: a Debian package of component runtime (programs, shared
# libraries, the texts they read, manual pages, completion) with the LibTorch that they were linked
# with, in a folder of its own.
include_guard(GLOBAL)

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME isoshard)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_PACKAGE_CONTACT "isoshard developers <isoshard@isoshard.example>")
set(CPACK_PACKAGE_VENDOR isoshard)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_COMPONENTS_ALL runtime)
set(CPACK_COMPONENTS_GROUPING ALL_COMPONENTS_IN_ONE)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_DESCRIPTION
  "Judges parallel training against what one process computes, tensor by tensor.\n\
 The package carries the LibTorch that its programs were built with, in /usr/lib/isoshard.")
# The libraries that the programs are linked with; LibTorch's own are in the package.
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_COMPRESSION_TYPE xz)
get_filename_component(_isoshard_libtorch_lib ${LibTorch_CPU_LIBRARY} DIRECTORY)
file(WRITE ${PROJECT_BINARY_DIR}/package_libtorch_dir.txt "${_isoshard_libtorch_lib}")
file(GLOB _isoshard_nvidia_libs ${_isoshard_libtorch_lib}/../../nvidia/*/lib)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${_isoshard_libtorch_lib} ${_isoshard_nvidia_libs})
set(CPACK_ISOSHARD_BINARY_DIR ${PROJECT_BINARY_DIR})
set(CPACK_PRE_BUILD_SCRIPTS ${PROJECT_SOURCE_DIR}/cmake/PackLibTorch.cmake)
include(CPack)
