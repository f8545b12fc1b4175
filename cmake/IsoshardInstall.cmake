# SPDX-License-Identifier: Apache-2.0
# `cmake --install`: the program, the text it reads, the libraries with their headers, and a CMake
# package.
include_guard(GLOBAL)
include(CMakePackageConfigHelpers)

set(_isoshard_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/isoshard)
include(IsoshardManual)
# Component runtime: what a package of programs has. Everything else is for those who build on it.
install(TARGETS isoshard_app isoshard_judge_app RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
  COMPONENT runtime)
install(TARGETS isoshard_stats_c isoshard_ranks_c EXPORT isoshard-targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime
  FILE_SET HEADERS DESTINATION ${ISOSHARD_INSTALL_HEADERS})
install(FILES ${PROJECT_SOURCE_DIR}/fixtures/text/kjv_genesis_to_joshua.txt
  ${PROJECT_SOURCE_DIR}/fixtures/text/seven_samples.txt
  DESTINATION ${CMAKE_INSTALL_DATADIR}/isoshard COMPONENT runtime)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/golden DESTINATION ${CMAKE_INSTALL_DATADIR}/isoshard
  COMPONENT runtime FILES_MATCHING PATTERN "*.json")
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT runtime)
install(TARGETS isoshard_options EXPORT isoshard-targets)
set_target_properties(isoshard_options PROPERTIES EXPORT_NAME options)
install(EXPORT isoshard-targets NAMESPACE isoshard:: DESTINATION ${_isoshard_package_dir})

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/isoshard-config.cmake.in
  ${PROJECT_BINARY_DIR}/isoshard-config.cmake
  INSTALL_DESTINATION ${_isoshard_package_dir})
# Before 1.0 any minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/isoshard-config-version.cmake COMPATIBILITY
  SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/isoshard-config.cmake
  ${PROJECT_BINARY_DIR}/isoshard-config-version.cmake
              ${PROJECT_SOURCE_DIR}/cmake/IsoshardAddTest.cmake
              ${PROJECT_SOURCE_DIR}/cmake/FindLibTorch.cmake
              ${PROJECT_SOURCE_DIR}/cmake/FindXxHash.cmake
  DESTINATION ${_isoshard_package_dir})
