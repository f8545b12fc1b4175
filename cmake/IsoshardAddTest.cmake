# SPDX-License-Identifier: Apache-2.0
# Part of the installed CMake package: tests with ranks in projects of others (docs/googletest.md).
include_guard(GLOBAL)
include(GoogleTest)

# isoshard_add_test(NAME SOURCES file... [LIBRARIES target...] [LABELS label...] [TIMEOUT seconds])
#   A GoogleTest program NAME whose tests may start ranks with run_world
#   (harness/testing/run_world.h), and one ctest entry NAME.Suite.Case for each of its tests. It has
#   a main of isoshard; its ranks are forked or, as `mpirun -n 4 NAME --attach`, processes of mpirun
#   where isoshard was built with MPI. It may use tensors and collectives of tensors
#   (core/comm/tensor.h); LIBRARIES names what else it needs, such as isoshard::verify_runs.
#   Each entry has label `isoshard` and LABELS, and is ended after TIMEOUT seconds (default 600, as
#   a machine may be busy with other things).
#   Call enable_testing() before.
function(isoshard_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "" "TIMEOUT" "SOURCES;LIBRARIES;LABELS")
  if(ARG_UNPARSED_ARGUMENTS OR NOT ARG_SOURCES)
    message(FATAL_ERROR "isoshard_add_test(${name}): SOURCES must be given, and nothing but "
      "LIBRARIES, LABELS and TIMEOUT besides; got '${ARG_UNPARSED_ARGUMENTS}'")
  endif()
  if(NOT TARGET isoshard::testing_main)
    message(FATAL_ERROR "isoshard_add_test(${name}): this isoshard was built without GoogleTest; "
      "build and install it with -DISOSHARD_BUILD_TESTS=ON")
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 600)
  endif()
  set(main isoshard::testing_main)
  if(TARGET isoshard::testing_main_mpi)
    set(main isoshard::testing_main_mpi)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${main} isoshard::testing isoshard::comm_tensor
    isoshard::libtorch GTest::gmock ${ARG_LIBRARIES})
  gtest_discover_tests(${name} TEST_PREFIX ${name}. TEST_LIST isoshard_tests_of_${name}
    DISCOVERY_TIMEOUT ${ARG_TIMEOUT} PROPERTIES TIMEOUT ${ARG_TIMEOUT})
  # gtest_discover_tests() hands on the first label of a list only: the others are set when ctest
  # knows the tests.
  set(script ${CMAKE_CURRENT_BINARY_DIR}/${name}_labels.cmake)
  set(labels isoshard ${ARG_LABELS})
  file(WRITE ${script} "if(isoshard_tests_of_${name})  # none before the program is built\n"
    "  set_tests_properties(\${isoshard_tests_of_${name}} PROPERTIES LABELS \"${labels}\")\n"
    "endif()\n")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${script})
endfunction()
