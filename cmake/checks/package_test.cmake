# SPDX-License-Identifier: Apache-2.0
# Installs the build into an empty folder, and builds and runs projects that know nothing but that
# folder.
#   cmake -DBUILD=DIR -DSOURCE=DIR -DFOLDER=DIR [-DLIBTORCH_ROOT=DIR] [-DCOMPILER=PROGRAM]
#   [-DMPI=TRUE] -DGENERATOR=NAME -P package_test.cmake
function(must)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE
    output)
  if(NOT result EQUAL 0)
    list(JOIN ARGV " " command)
    message(FATAL_ERROR "${command}\nended with ${result}:\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${FOLDER})
must(${CMAKE_COMMAND} --install ${BUILD} --prefix ${FOLDER}/installed)
# Nothing may lead back to the tree or the build folder.
file(GLOB package ${FOLDER}/installed/lib*/cmake/isoshard/*.cmake
  ${FOLDER}/installed/lib*/*/cmake/isoshard/*.cmake)
if(NOT package)
  message(FATAL_ERROR "no CMake package below ${FOLDER}/installed")
endif()
foreach(file IN LISTS package)
  file(READ ${file} text)
  foreach(folder "${SOURCE}/" "${BUILD}/")
    string(FIND "${text}" "${folder}" place)
    if(NOT place EQUAL -1)
      message(FATAL_ERROR
        "${file} holds the path ${folder}, which an installed package must not need")
    endif()
  endforeach()
endforeach()
must(${FOLDER}/installed/bin/isoshard verify --preset small --subjects ddp --dp 2 --dtype fp32)

must(${FOLDER}/installed/bin/isoshard-judge compare --help)
foreach(file man/man1/isoshard-verify.1 bash-completion/completions/isoshard)
  if(NOT EXISTS ${FOLDER}/installed/share/${file})
    message(FATAL_ERROR "share/${file} must be below ${FOLDER}/installed")
  endif()
endforeach()
file(GLOB stats ${FOLDER}/installed/lib*/libisoshard_stats.so.1
  ${FOLDER}/installed/lib*/*/libisoshard_stats.so.1)
if(NOT stats OR NOT EXISTS ${FOLDER}/installed/include/isoshard/harness/stats/isoshard_stats.h)
  message(FATAL_ERROR "libisoshard_stats.so.1 and its header must be below ${FOLDER}/installed")
endif()
file(GLOB ranks ${FOLDER}/installed/lib*/libisoshard_ranks.so.1
  ${FOLDER}/installed/lib*/*/libisoshard_ranks.so.1)
if(NOT ranks OR NOT EXISTS ${FOLDER}/installed/include/isoshard/harness/ranks/isoshard_ranks.h)
  message(FATAL_ERROR "libisoshard_ranks.so.1 and its header must be below ${FOLDER}/installed")
endif()

set(options -G ${GENERATOR} -DCMAKE_PREFIX_PATH=${FOLDER}/installed
  -DLIBTORCH_ROOT=${LIBTORCH_ROOT} -DCMAKE_CXX_COMPILER=${COMPILER}
  -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER})
# The examples, each with so many tests.
function(example name count)
  must(${CMAKE_COMMAND} ${options} -S ${SOURCE}/examples/${name} -B ${FOLDER}/${name})
  must(${CMAKE_COMMAND} --build ${FOLDER}/${name})
  must(${CMAKE_CTEST_COMMAND} --test-dir ${FOLDER}/${name} --no-tests=error --output-on-failure)
  if(NOT output MATCHES "tests passed, 0 tests failed out of ${count}\n")
    message(FATAL_ERROR "${count} tests of examples/${name} must run:\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()
example(own_subject 3)
example(own_training 2)
example(three_ranks 1)
# README and the page show the example as it is, without its license line.
foreach(shown README.md:three_ranks.cc docs/googletest.md:three_ranks.cc
    docs/googletest.md:CMakeLists.txt)
  string(REGEX MATCH "^(.*):(.*)$" both ${shown})
  set(page ${CMAKE_MATCH_1})
  set(file ${CMAKE_MATCH_2})
  file(READ ${SOURCE}/${page} text)
  file(READ ${SOURCE}/examples/three_ranks/${file} code)
  string(REGEX REPLACE "^((//|#) [^\n]*\n)+" "" code "${code}")
  string(FIND "${text}" "${code}" place)
  if(place EQUAL -1)
    message(FATAL_ERROR "${page} must show examples/three_ranks/${file} as it is:\n${code}")
  endif()
endforeach()
# isoshard_add_test() gives its entries a label.
must(${CMAKE_CTEST_COMMAND} --test-dir ${FOLDER}/three_ranks -N -L ^isoshard$ -R EqualsOneProcess)
if(NOT output MATCHES "Total Tests: 1\n")
  message(FATAL_ERROR "a test of isoshard_add_test() must have label isoshard:\n${output}")
endif()

# The names of docs/your-own-subject.md are in the headers that it names.
file(STRINGS ${SOURCE}/docs/your-own-subject.md rows REGEX "^[|] `.*[|] `[a-z_/]+[.]h`")
set(includes)
set(usings)
set(count 0)
foreach(row IN LISTS rows)
  string(REGEX MATCH "^([^|]*[|][^|]*)[|] `([a-z_/]+[.]h)`" columns "${row}")
  set(names_column "${CMAKE_MATCH_1}")
  set(header ${CMAKE_MATCH_2})
  # The package has two roots of includes.
  set(file ${FOLDER}/installed/include/isoshard/${header})
  if(NOT EXISTS ${file})
    set(file ${FOLDER}/installed/include/isoshard/src/${header})
  endif()
  file(READ ${file} text)
  string(APPEND includes "#include \"${header}\"\n")
  string(REGEX MATCHALL "`[A-Za-z_]+`" names "${names_column}")
  foreach(name IN LISTS names)
    string(REPLACE "`" "" name "${name}")
    if(NOT text MATCHES "[^A-Za-z_]${name}[^A-Za-z_]")
      message(FATAL_ERROR "docs/your-own-subject.md: ${header} does not have ${name}")
    endif()
    string(APPEND usings "using isoshard::${name};\n")
    math(EXPR count "${count} + 1")
  endforeach()
endforeach()
if(count LESS 30)
  message(FATAL_ERROR "docs/your-own-subject.md must name the headers of 30 names, got ${count}")
endif()
file(WRITE ${FOLDER}/names/names.cc "${includes}${usings}")
file(WRITE ${FOLDER}/names/CMakeLists.txt
  "cmake_minimum_required(VERSION 3.25)\nproject(names LANGUAGES CXX)\n"
  "find_package(isoshard REQUIRED)\nadd_library(names OBJECT names.cc)\n"
  "target_link_libraries(names PRIVATE isoshard::verify_runs isoshard::matchers\n"
  "  isoshard::comm_tensor)\n")
must(${CMAKE_COMMAND} ${options} -S ${FOLDER}/names -B ${FOLDER}/names/build)
must(${CMAKE_COMMAND} --build ${FOLDER}/names/build)

# Failures of ranks in a project that links GoogleTest's own main.
file(WRITE ${FOLDER}/lost_failures/CMakeLists.txt
  "cmake_minimum_required(VERSION 3.25)\nproject(lost_failures LANGUAGES CXX)\n"
  "find_package(isoshard REQUIRED)\n"
  "foreach(name failing_ranks unjoined_ranks)\n"
  "  add_executable(\${name} ${SOURCE}/harness/testing/lost_failures/\${name}.cc)\n"
  "endforeach()\n"
  "target_link_libraries(failing_ranks PRIVATE GTest::gtest_main isoshard::testing)\n"
  "target_link_libraries(unjoined_ranks PRIVATE GTest::gtest_main isoshard::world)\n")
must(${CMAKE_COMMAND} ${options} -S ${FOLDER}/lost_failures -B ${FOLDER}/lost_failures/build)
must(${CMAKE_COMMAND} --build ${FOLDER}/lost_failures/build)
must(${CMAKE_COMMAND} -DFAILING_RANKS=${FOLDER}/lost_failures/build/failing_ranks
  -DUNJOINED_RANKS=${FOLDER}/lost_failures/build/unjoined_ranks
  -DFOLDER=${FOLDER}/lost_failures/results
  -P ${SOURCE}/harness/testing/lost_failures/check_lost_failures.cmake)

# The component mpi is there if this build has it, and else a requirement that is not met.
file(WRITE ${FOLDER}/with_mpi/CMakeLists.txt
  "cmake_minimum_required(VERSION 3.25)\nproject(with_mpi LANGUAGES CXX)\n"
  "set(CMAKE_CXX_STANDARD 20)\n"
  "find_package(isoshard REQUIRED COMPONENTS mpi)\nadd_executable(with_mpi main.cc)\n"
  "target_link_libraries(with_mpi PRIVATE isoshard::comm_mpi)\n")
file(WRITE ${FOLDER}/with_mpi/main.cc
  "#include <core/comm/attached_job.h>\n#include <cstdio>\n#include <exception>\n"
  "int main() {\n  try {\n    (void)isoshard::attach_mpi_job();\n"
  "  } catch (const std::exception& error) {\n    std::puts(error.what());\n  }\n}\n")
set(configure ${CMAKE_COMMAND} ${options} -S ${FOLDER}/with_mpi -B ${FOLDER}/with_mpi/build)
if(MPI)
  must(${configure})
  must(${CMAKE_COMMAND} --build ${FOLDER}/with_mpi/build)
  must(${CMAKE_COMMAND} -E env --unset=OMPI_COMM_WORLD_SIZE ${FOLDER}/with_mpi/build/with_mpi)
  if(NOT output MATCHES "mpirun -n RANKS")
    message(FATAL_ERROR "a program that nobody attached must be told to use mpirun:\n${output}")
  endif()
else()
  execute_process(COMMAND ${configure} RESULT_VARIABLE result OUTPUT_QUIET ERROR_VARIABLE error)
  if(result EQUAL 0 OR NOT error MATCHES "mpi")
    message(FATAL_ERROR "component mpi of a build without MPI must be refused by name:\n${error}")
  endif()
endif()
file(REMOVE_RECURSE ${FOLDER})
