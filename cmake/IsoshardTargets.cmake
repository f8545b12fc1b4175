# SPDX-License-Identifier: Apache-2.0
# One function per kind of target. Every target of the project is made by one of these.
include_guard(GLOBAL)
include(GNUInstallDirs)
# Headers keep their folders below it, as includes are rooted at the tree and at src/.
set(ISOSHARD_INSTALL_HEADERS ${CMAKE_INSTALL_INCLUDEDIR}/isoshard)

# The one precompiled header (ATen, autograd, gtest); every TORCH target and every test reuses it.
# Where lines are counted (ISOSHARD_COVERAGE), libraries of src and harness have one with their
# flags.
function(isoshard_precompiled_header)
  _isoshard_add_pch(isoshard_pch)
  if(ISOSHARD_COVERAGE)
    _isoshard_add_pch(isoshard_counted_pch)
    _isoshard_count_lines(isoshard_counted_pch)
  endif()
endfunction()

function(_isoshard_add_pch target)
  add_library(${target} OBJECT ${PROJECT_SOURCE_DIR}/cmake/pch.cc)
  target_link_libraries(${target} PRIVATE isoshard::options isoshard::libtorch fmt::fmt
    nlohmann_json::nlohmann_json)
  if(ISOSHARD_BUILD_TESTS)
    target_link_libraries(${target} PRIVATE GTest::gtest GTest::gmock)
  endif()
  target_precompile_headers(${target} PRIVATE ${PROJECT_SOURCE_DIR}/cmake/pch.h)
  # With -O1, GCC 12 crashes where a HOT library (-O2) reads it. The other way round it works.
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O2>)
  # ccache hashes this file instead of the 440 MB beside it, for every source (CCACHE_PCH_EXTSUM).
  if(ISOSHARD_CCACHE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    set(folder ${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/${target}.dir)
    add_custom_command(OUTPUT ${folder}/cmake_pch.hxx.gch.sum
      DEPENDS ${target} ${folder}/cmake_pch.hxx.gch
      COMMAND ${CMAKE_COMMAND} -E sha256sum cmake_pch.hxx.gch > cmake_pch.hxx.gch.sum
      WORKING_DIRECTORY ${folder})
    add_custom_target(${target}_sum DEPENDS ${folder}/cmake_pch.hxx.gch.sum)
  endif()
endfunction()

# Threads and forked ranks count in the same files.
function(_isoshard_count_lines target)
  target_compile_options(${target} PRIVATE --coverage -fprofile-update=atomic)
endfunction()

function(_isoshard_reuse_pch target)
  if(ISOSHARD_JUDGE_ONLY)
    return()
  endif()
  get_target_property(options ${target} COMPILE_OPTIONS)
  set(pch isoshard_pch)
  if("--coverage" IN_LIST options)
    set(pch isoshard_counted_pch)
  endif()
  target_precompile_headers(${target} REUSE_FROM ${pch})
  if(TARGET ${pch}_sum)
    add_dependencies(${target} ${pch}_sum)
  endif()
endfunction()

# isoshard_library(NAME [HOT] [TORCH] [INTERNAL] HEADERS ... SOURCES ... [DEPS ...])
#   A static library isoshard_NAME with alias isoshard::NAME. HOT: runs spend their time in it, so it
#   is compiled by -O2; everything else is by -O1, which takes a third less time to compile. TORCH:
#   it sees ATen and reuses the precompiled header.
#   DEPS are linked publicly. It is part of the installed package unless INTERNAL.
function(isoshard_library name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "HOT;TORCH;INTERNAL" "" "HEADERS;SOURCES;DEPS")
  if(ARG_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "isoshard_library(${name}): unknown arguments ${ARG_UNPARSED_ARGUMENTS}")
  endif()
  set(target isoshard_${name})
  if(ARG_SOURCES)
    add_library(${target} STATIC ${ARG_SOURCES})
    set(scope PUBLIC)
  else()
    add_library(${target} INTERFACE)
    set(scope INTERFACE)
  endif()
  add_library(isoshard::${name} ALIAS ${target})
  target_sources(${target} ${scope} FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR} FILES
    ${ARG_HEADERS})
  target_link_libraries(${target} ${scope} isoshard::options fmt::fmt ${ARG_DEPS})
  if(ARG_HOT AND ARG_SOURCES)
    target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O2>)
  endif()
  if(ISOSHARD_COVERAGE AND ARG_SOURCES
      AND CMAKE_CURRENT_SOURCE_DIR MATCHES "^${PROJECT_SOURCE_DIR}/(src|harness)/")
    _isoshard_count_lines(${target})
  endif()
  if(ARG_TORCH)
    target_link_libraries(${target} ${scope} isoshard::libtorch)
    if(ARG_SOURCES)
      target_link_libraries(${target} PRIVATE nlohmann_json::nlohmann_json)
      _isoshard_reuse_pch(${target})
    endif()
  endif()
  if(ARG_INTERNAL)
    return()
  endif()
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  install(TARGETS ${target} EXPORT isoshard-targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
    FILE_SET HEADERS DESTINATION ${ISOSHARD_INSTALL_HEADERS})
endfunction()

# isoshard_c_library(NAME SOURCE HEADER MAP VERSION DEPS ...): libisoshard_NAME.so, a shared library
# for programs in any language that shows its C interface alone, by a linker's map.
function(isoshard_c_library name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "" "SOURCE;HEADER;MAP;VERSION" "DEPS")
  set(target isoshard_${name}_c)
  add_library(${target} SHARED ${ARG_SOURCE})
  add_library(isoshard::${name}_c ALIAS ${target})
  string(REGEX MATCH "^[0-9]+" abi ${ARG_VERSION})
  set_target_properties(${target} PROPERTIES
    OUTPUT_NAME isoshard_${name} EXPORT_NAME ${name}_c
    VERSION ${ARG_VERSION} SOVERSION ${abi}
    CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
    LINK_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${ARG_MAP})
  target_sources(${target} PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR}
    FILES ${ARG_HEADER})
  target_include_directories(${target} INTERFACE
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}> $<INSTALL_INTERFACE:${ISOSHARD_INSTALL_HEADERS}>)
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:isoshard::options>)
  foreach(dep IN LISTS ARG_DEPS)
    target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:${dep}>)
  endforeach()
  target_link_options(${target} PRIVATE
    LINKER:--version-script,${CMAKE_CURRENT_SOURCE_DIR}/${ARG_MAP})
endfunction()

# isoshard_program(NAME [TORCH] SOURCES ... [DEPS ...] [OUTPUT_NAME name]): an executable in the
# build folder's bin/.
function(isoshard_program name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "TORCH" "OUTPUT_NAME" "SOURCES;DEPS")
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE isoshard::options fmt::fmt ${ARG_DEPS})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
  if(ARG_OUTPUT_NAME)
    set_target_properties(${name} PROPERTIES OUTPUT_NAME ${ARG_OUTPUT_NAME})
  endif()
  if(ARG_TORCH)
    target_link_libraries(${name} PRIVATE isoshard::libtorch nlohmann_json::nlohmann_json)
    _isoshard_reuse_pch(${name})
  endif()
endfunction()

# What every test program has.
function(_isoshard_add_test_program name)
  add_executable(${name} ${ARGN})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  target_link_libraries(${name} PRIVATE isoshard::options fmt::fmt GTest::gmock GTest::gtest)
endfunction()

# isoshard_test(NAME SOURCES ... SUITES "Suite" "Suite:label,label" ... [DEPS ...] [LABELS ...]
#               [TIMEOUT s] [PLAIN])
#   One gtest program. Entries of ctest: NAME.Suite for each listed suite with labels after a colon,
#   and NAME.in_process, which runs all others in one process (a process that loads LibTorch takes
#   0.25 s). A parametrized suite Prefix/Suite is listed as Suite. An entry has LABELS, the labels
#   after the colon, and a TIMEOUT (default 600 s). It fails when the program holds a suite that is
#   not listed, or lacks one that is. `./isoshard test SUITE` finds it by its property
#   ISOSHARD_SUITES (cmake/list_tests.cmake).
#   Labels world2, world3, ... say which sizes the suite's worlds have (all of them but 1); the
#   entry fails if that is not so.
#   Label 1ofN: the entry runs one of N shares of the suite's tests, and entries
#   NAME.Suite.2ofN, ... of label slow run the others. For suites of many cases that cost much.
#   PLAIN: no ATen, gtest's own main, no precompiled header; each suite has its entry, and a further
#   one, NAME.suites, checks the list. Otherwise the program runs under harness/testing's main,
#   which makes it the controller of forked worlds, or, as mpirun -n 4 PROGRAM --attach, one of
#   their ranks.
function(isoshard_test name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "PLAIN" "TIMEOUT" "SOURCES;SUITES;DEPS;LABELS")
  if(ARG_UNPARSED_ARGUMENTS OR NOT ARG_SUITES)
    message(FATAL_ERROR
      "isoshard_test(${name}): needs SUITES; unknown arguments: ${ARG_UNPARSED_ARGUMENTS}")
  endif()
  if(NOT ISOSHARD_BUILD_TESTS)
    return()
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 600)
  endif()
  _isoshard_add_test_program(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS})
  if(ARG_PLAIN)
    target_link_libraries(${name} PRIVATE GTest::gtest_main)
  else()
    target_link_libraries(${name} PRIVATE isoshard::testing_main_mpi isoshard::libtorch
      nlohmann_json::nlohmann_json)
    _isoshard_reuse_pch(${name})
  endif()
  list(TRANSFORM ARG_SUITES REPLACE ":.*" "" OUTPUT_VARIABLE suites)
  set(in_process)
  foreach(entry IN LISTS ARG_SUITES)
    string(REPLACE ":" ";" labels "${entry}")
    list(POP_FRONT labels suite)
    string(REPLACE "," ";" labels "${labels}")
    if(NOT labels AND NOT ARG_PLAIN)
      list(APPEND in_process ${suite})
      continue()
    endif()
    set(shares 1)
    if(labels MATCHES "(^|;)1of([2-9])(;|$)")
      set(shares ${CMAKE_MATCH_2})
      list(REMOVE_ITEM labels 1of${shares})
    endif()
    foreach(share RANGE 1 ${shares})
      _isoshard_suite_entry(${name} ${suite} "${suite}" "${suites}" ${share} ${shares}
        ${ARG_TIMEOUT} "${ARG_PLAIN}" ${ARG_LABELS} ${labels})
    endforeach()
  endforeach()
  if(in_process)
    _isoshard_suite_entry(${name} in_process "${in_process}" "${suites}" 1 1 ${ARG_TIMEOUT} FALSE
      ${ARG_LABELS})
  endif()
  if(ARG_PLAIN)
    _isoshard_suites_check(${name} ${suites})
  endif()
endfunction()

# The entry NAME.suites: the program holds the listed suites and no others.
function(_isoshard_suites_check name)
  add_test(NAME ${name}.suites COMMAND ${CMAKE_COMMAND} -DPROGRAM=$<TARGET_FILE:${name}>
    "-DSUITES=${ARGN}" -P ${PROJECT_SOURCE_DIR}/cmake/checks/check_suites.cmake)
  set_tests_properties(${name}.suites PROPERTIES LABELS "unit;structure" TIMEOUT 600)
endfunction()

# The entry of ctest NAME.KIND for one of `shares` shares (GoogleTest's shards) of some suites of a
# program that has `all` suites.
function(_isoshard_suite_entry name kind suites all share shares timeout plain)
  set(labels ${ARGN})
  set(entry ${name}.${kind})
  set(environment ISOSHARD_WHOLE_SUITE=1)
  if(shares GREATER 1)
    math(EXPR index "${share} - 1")
    set(environment GTEST_TOTAL_SHARDS=${shares} GTEST_SHARD_INDEX=${index})
  endif()
  if(share GREATER 1)
    string(APPEND entry .${share}of${shares})
    list(APPEND labels slow)
  endif()
  set(patterns)
  foreach(suite IN LISTS suites)
    list(APPEND patterns ${suite}.* */${suite}.*)
  endforeach()
  list(JOIN patterns ":" patterns)
  add_test(NAME ${entry} COMMAND ${name} --gtest_filter=${patterns}
    --gtest_output=xml:${PROJECT_BINARY_DIR}/junit/${entry}.xml)
  set(sizes ${labels})
  list(FILTER sizes INCLUDE REGEX "^world[0-9]+$")
  list(REMOVE_ITEM sizes world1)
  list(SORT sizes COMPARE NATURAL)
  if("gpu" IN_LIST labels)
    # a GPU for each rank of the largest world, where ctest knows them (doctor --resource-spec)
    set(ranks world1 ${sizes})
    list(POP_BACK ranks largest)
    string(REPLACE "world" "" largest ${largest})
    set_tests_properties(${entry} PROPERTIES RESOURCE_GROUPS "${largest},gpus:1")
  endif()
  if(NOT plain)
    list(JOIN all "," all)
    list(APPEND environment "ISOSHARD_LISTED_SUITES=${all}")
    if(sizes)
      list(JOIN sizes "," sizes)
      string(REPLACE "world" "" sizes "${sizes}")
      list(APPEND environment "ISOSHARD_WORLD_SIZES=${sizes}")
    endif()
  endif()
  set_tests_properties(${entry} PROPERTIES LABELS "${labels}" TIMEOUT ${timeout}
    ENVIRONMENT "${environment}" ISOSHARD_SUITES "${suites}")
endfunction()

# isoshard_mpi_command(VARIABLE)
#   How tests start ranks; -n RANKS PROGRAM follows. Ranks may outnumber cores: they give a core
#   away where they wait.
function(isoshard_mpi_command variable)
  set(${variable} ${MPIEXEC_EXECUTABLE} --oversubscribe --bind-to none --allow-run-as-root
    --mca mpi_yield_when_idle 1 PARENT_SCOPE)
endfunction()

# isoshard_mpi_test(NAME SOURCES ... SUITES ... WORLD_SIZES n... [SLOW_WORLD_SIZES n...]
#                   [DEPS ...] [LABELS ...] [TIMEOUT s])
#   One gtest program whose ranks are processes of mpirun, and one ctest entry NAME.nN for each size
#   of world, with labels mpi and worldN, and slow for those of SLOW_WORLD_SIZES. Each entry runs
#   the tests of its size. It fails if MPI makes a world of another size, and if a test fails on any
#   rank. A further entry, NAME.suites, checks SUITES. Does nothing without MPI.
function(isoshard_mpi_test name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "" "TIMEOUT"
    "SOURCES;SUITES;WORLD_SIZES;SLOW_WORLD_SIZES;DEPS;LABELS")
  if(ARG_UNPARSED_ARGUMENTS OR NOT ARG_WORLD_SIZES OR NOT ARG_SUITES)
    message(FATAL_ERROR "isoshard_mpi_test(${name}): needs SUITES and WORLD_SIZES; unknown: "
      "${ARG_UNPARSED_ARGUMENTS}")
  endif()
  if(NOT ISOSHARD_BUILD_TESTS OR NOT MPI_C_FOUND)
    return()
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 600)
  endif()
  _isoshard_add_test_program(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE isoshard::mpi_testing ${ARG_DEPS})
  isoshard_mpi_command(launch)
  foreach(size IN LISTS ARG_WORLD_SIZES ARG_SLOW_WORLD_SIZES)
    set(entry ${name}.n${size})
    set(labels ${ARG_LABELS} mpi world${size})
    if(size IN_LIST ARG_SLOW_WORLD_SIZES)
      list(APPEND labels slow)
    endif()
    add_test(NAME ${entry}
      COMMAND ${launch} -n ${size} $<TARGET_FILE:${name}> --expect-world-size=${size}
      --gtest_output=xml:${PROJECT_BINARY_DIR}/junit/${entry}.xml)
    # ranks that wait give their core away: more than two need no more of ctest's
    set(processors ${size})
    if(size GREATER 2)
      set(processors 2)
    endif()
    set_tests_properties(${entry} PROPERTIES LABELS "${labels}" ISOSHARD_SUITES "${ARG_SUITES}"
      TIMEOUT ${ARG_TIMEOUT} PROCESSORS ${processors})
  endforeach()
  _isoshard_suites_check(${name} ${ARG_SUITES})
endfunction()

# isoshard_stand_in_test(NAME SOURCES ... SUITES ... WORLD_SIZES n... [SLOW n2 device.n3 ...]
#                        [DEPS ...] [LABELS ...] [TIMEOUT s])
#   One gtest program of the nccl backend over a stand-in for CUDA and NCCL, whose ranks are forked
#   at its start, and two ctest entries for each size of world: NAME.nN, whose tests hand buffers of
#   the host to communicators, and NAME.device.nN, where they are on the (stand-in's) device. Labels
#   nccl and worldN, and slow for those that SLOW names. A further entry, NAME.suites, checks
#   SUITES.
function(isoshard_stand_in_test name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "" "TIMEOUT"
    "SOURCES;SUITES;WORLD_SIZES;SLOW;DEPS;LABELS")
  if(ARG_UNPARSED_ARGUMENTS OR NOT ARG_WORLD_SIZES OR NOT ARG_SUITES)
    message(FATAL_ERROR "isoshard_stand_in_test(${name}): needs SUITES and WORLD_SIZES; unknown: "
      "${ARG_UNPARSED_ARGUMENTS}")
  endif()
  if(NOT ISOSHARD_BUILD_TESTS)
    return()
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 600)
  endif()
  _isoshard_add_test_program(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE isoshard::stand_in_main isoshard::nccl_testing
    ${ARG_DEPS})
  foreach(size IN LISTS ARG_WORLD_SIZES)
    foreach(buffers IN ITEMS host device)
      set(kind n${size})
      if(buffers STREQUAL "device")
        set(kind device.n${size})
      endif()
      set(entry ${name}.${kind})
      set(labels ${ARG_LABELS} nccl world${size})
      if(kind IN_LIST ARG_SLOW)
        list(APPEND labels slow)
      endif()
      add_test(NAME ${entry} COMMAND ${name} --ranks=${size} --buffers=${buffers}
        --gtest_output=xml:${PROJECT_BINARY_DIR}/junit/${entry}.xml)
      set_tests_properties(${entry} PROPERTIES LABELS "${labels}" ISOSHARD_SUITES "${ARG_SUITES}"
        TIMEOUT ${ARG_TIMEOUT} PROCESSORS ${size})
    endforeach()
  endforeach()
  _isoshard_suites_check(${name} ${ARG_SUITES})
endfunction()
