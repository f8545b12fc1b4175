# SPDX-License-Identifier: Apache-2.0
# A night's run in one command: set up, configure, build, test, line coverage.
#
#   ctest -S cmake/nightly.cmake                                  all tests but gpu, and coverage
#   ctest -S cmake/nightly.cmake,quick                            without the slow ones
#   ISOSHARD_BUILD_DIR=/tmp/nightly ctest -S cmake/nightly.cmake  in another folder
#
# Results: ctest.xml (JUnit), coverage.txt and Testing/ in the build folder (build-nightly). It
# fails if a test failed, if none ran, or if fewer than 85 % of the lines of src and harness ran.
# Ranks leave without exit(): end_process() writes their counts.
cmake_minimum_required(VERSION 3.25)

set(least_percent 85)
get_filename_component(CTEST_SOURCE_DIRECTORY ${CMAKE_CURRENT_LIST_DIR}/.. ABSOLUTE)
set(CTEST_BINARY_DIRECTORY ${CTEST_SOURCE_DIRECTORY}/build-nightly)
if(DEFINED ENV{ISOSHARD_BUILD_DIR})
  get_filename_component(CTEST_BINARY_DIRECTORY $ENV{ISOSHARD_BUILD_DIR} ABSOLUTE)
endif()
set(CTEST_CMAKE_GENERATOR Ninja)
site_name(CTEST_SITE)
set(CTEST_BUILD_NAME nightly)
cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)

# The launcher installs packages and LibTorch, and configures.
set(ENV{ISOSHARD_BUILD_DIR} ${CTEST_BINARY_DIRECTORY})
set(ENV{ISOSHARD_CMAKE_ARGS} -DISOSHARD_COVERAGE=ON)
execute_process(COMMAND ${CTEST_SOURCE_DIRECTORY}/isoshard --version RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "set-up or build failed (above)")
endif()
# Its settings are not those of the tests.
unset(ENV{ISOSHARD_BUILD_DIR})
unset(ENV{ISOSHARD_CMAKE_ARGS})

ctest_start(Nightly)
ctest_configure(RETURN_VALUE failed)
if(failed)
  message(FATAL_ERROR "configuring failed; see ${CTEST_BINARY_DIRECTORY}/Testing")
endif()
ctest_build(PARALLEL_LEVEL ${cores} RETURN_VALUE failed)
if(failed)
  message(FATAL_ERROR "the build failed; see ${CTEST_BINARY_DIRECTORY}/Testing")
endif()

# What earlier runs have counted is no part of this one.
file(GLOB_RECURSE counts ${CTEST_BINARY_DIRECTORY}/*.gcda)
if(counts)
  file(REMOVE ${counts})
endif()
set(excluded "^gpu$")
if(CTEST_SCRIPT_ARG STREQUAL quick)
  set(excluded "^(gpu|slow)$")
elseif(CTEST_SCRIPT_ARG)
  message(FATAL_ERROR "the argument must be 'quick' or left out, got '${CTEST_SCRIPT_ARG}'")
endif()
ctest_test(EXCLUDE_LABEL "${excluded}" PARALLEL_LEVEL ${cores}
  OUTPUT_JUNIT ${CTEST_BINARY_DIRECTORY}/ctest.xml RETURN_VALUE tests_failed)
file(STRINGS ${CTEST_BINARY_DIRECTORY}/ctest.xml counted REGEX "^[ \t]*tests=\"[1-9]")
if(NOT counted)
  message(FATAL_ERROR "no test ran")
endif()

# Tests themselves, what only tests use, and generated files do not count.
find_program(CTEST_COVERAGE_COMMAND gcov REQUIRED)
set(CTEST_CUSTOM_COVERAGE_EXCLUDE
  "/(app|bench|build[^/]*|cmake|conformance|fixtures|suite)/" "_test\\.cc$" "/testing/"
  "/CMakeFiles/")
# ctest calls it an error if gcov names a file and removes it again, as it has no line that can run.
ctest_coverage(QUIET CAPTURE_CMAKE_ERROR ignored)
file(GLOB reports ${CTEST_BINARY_DIRECTORY}/Testing/*/Coverage.xml)
if(NOT reports)
  message(FATAL_ERROR "coverage could not be counted; gcov must be that of the compiler")
endif()
list(SORT reports)
list(POP_BACK reports report)
file(STRINGS ${report} percent REGEX "<PercentCoverage>")
string(REGEX REPLACE ".*<PercentCoverage>([0-9.]+)<.*" "\\1" percent "${percent}")
file(WRITE ${CTEST_BINARY_DIRECTORY}/coverage.txt "lines of src and harness: ${percent} %\n")
message(STATUS "lines of src and harness that ran: ${percent} % (at least ${least_percent} %)")
if(tests_failed)
  message(FATAL_ERROR "tests failed; see ${CTEST_BINARY_DIRECTORY}/ctest.xml")
endif()
if(percent LESS least_percent)
  message(FATAL_ERROR "at least ${least_percent} % of the lines must run, got ${percent} %")
endif()
