# SPDX-License-Identifier: Apache-2.0
# Installs the build into an empty folder, and builds and runs a project that knows nothing but
# that folder.
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

must(${CMAKE_COMMAND} -G ${GENERATOR} -S ${SOURCE}/examples/own_subject -B ${FOLDER}/consumer
  -DCMAKE_PREFIX_PATH=${FOLDER}/installed
  -DLIBTORCH_ROOT=${LIBTORCH_ROOT} -DCMAKE_CXX_COMPILER=${COMPILER}
  -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER})
must(${CMAKE_COMMAND} --build ${FOLDER}/consumer)
must(${CMAKE_CTEST_COMMAND} --test-dir ${FOLDER}/consumer --no-tests=error --output-on-failure)
if(NOT output MATCHES "1 tests? passed|tests passed, 0 tests failed out of 1")
  message(FATAL_ERROR "the consumer's test did not run:\n${output}")
endif()

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
set(configure ${CMAKE_COMMAND} -G ${GENERATOR} -S ${FOLDER}/with_mpi -B ${FOLDER}/with_mpi/build
  -DCMAKE_PREFIX_PATH=${FOLDER}/installed -DLIBTORCH_ROOT=${LIBTORCH_ROOT}
  -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER})
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
