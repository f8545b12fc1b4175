# SPDX-License-Identifier: Apache-2.0
# What needs CUDA, and where to find it: the toolkit with nvcc, NCCL, and a LibTorch whose CUDA
# libraries are all there. The build without CUDA needs none of it, and no target of it changes.
#
# ISOSHARD_CUDA  AUTO (default): built where all three are found, otherwise a line says what is
#                missing. The slim LibTorch of ./isoshard lacks libraries of CUDA, so there AUTO is
#                a build without CUDA, whatever else is installed; ./isoshard --gpu brings them.
#                ON: toolkit and NCCL must be found; without a CUDA LibTorch, targets that need it
#                are left out, with a line. OFF: nothing is looked for.
#
# Afterwards:    ISOSHARD_HAS_CUDA, ISOSHARD_HAS_TORCH_CUDA, and why not: ISOSHARD_WHY_NO_CUDA,
#                ISOSHARD_WHY_NO_TORCH_CUDA (one line each). Targets isoshard::cuda (runtime),
#                isoshard::nccl, isoshard::libtorch_cuda.
include_guard(GLOBAL)

set(ISOSHARD_CUDA AUTO CACHE STRING "CUDA and NCCL: AUTO, ON or OFF")
set_property(CACHE ISOSHARD_CUDA PROPERTY STRINGS AUTO ON OFF)
set(ISOSHARD_CUDA_ARCHITECTURES "80-real;90" CACHE STRING "GPUs that kernels are compiled for")
if(NOT ISOSHARD_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "ISOSHARD_CUDA must be AUTO, ON or OFF, got ${ISOSHARD_CUDA}")
endif()

# The LibTorch that was found, if the libraries of CUDA that it needs are there too.
macro(_isoshard_find_torch_cuda)
  get_filename_component(_torch_lib ${LibTorch_CPU_LIBRARY} DIRECTORY)
  set(ISOSHARD_WHY_NO_TORCH_CUDA "")
  if(NOT EXISTS ${_torch_lib}/libtorch_cuda.so OR NOT EXISTS ${_torch_lib}/libc10_cuda.so)
    set(ISOSHARD_WHY_NO_TORCH_CUDA
      "the LibTorch in ${_torch_lib} has no libtorch_cuda.so; ./isoshard --gpu installs one")
  else()
    execute_process(COMMAND ldd ${_torch_lib}/libtorch_cuda.so OUTPUT_VARIABLE _needed
      ERROR_VARIABLE _ldd_error)
    string(REGEX MATCHALL "[^ \t\n]+ => not found" _lacks "${_needed}")
    if(_lacks)
      string(REPLACE " => not found" "" _lacks "${_lacks}")
      list(JOIN _lacks ", " _lacks)
      set(ISOSHARD_WHY_NO_TORCH_CUDA
        "libtorch_cuda.so needs ${_lacks}; ./isoshard --gpu installs them")
    endif()
  endif()
endmacro()

macro(_isoshard_find_nccl)
  # where the toolkit is, or in the Python wheel nvidia-nccl beside torch
  find_path(NCCL_INCLUDE_DIR nccl.h
    HINTS ${NCCL_ROOT} ENV NCCL_ROOT ${CUDAToolkit_INCLUDE_DIRS} ${_torch_lib}/../../nvidia/nccl
    PATH_SUFFIXES include)
  find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2
    HINTS ${NCCL_ROOT} ENV NCCL_ROOT ${CUDAToolkit_LIBRARY_DIR} ${_torch_lib}/../../nvidia/nccl
    PATH_SUFFIXES lib lib64)
endmacro()

set(ISOSHARD_HAS_CUDA FALSE)
set(ISOSHARD_HAS_TORCH_CUDA FALSE)
set(ISOSHARD_WHY_NO_CUDA "")
if(ISOSHARD_CUDA STREQUAL "OFF")
  set(ISOSHARD_WHY_NO_CUDA "it was configured with ISOSHARD_CUDA=OFF")
  set(ISOSHARD_WHY_NO_TORCH_CUDA "${ISOSHARD_WHY_NO_CUDA}")
else()
  _isoshard_find_torch_cuda()
  if(ISOSHARD_CUDA STREQUAL "AUTO" AND ISOSHARD_WHY_NO_TORCH_CUDA)
    set(ISOSHARD_WHY_NO_CUDA "${ISOSHARD_WHY_NO_TORCH_CUDA}")
  else()
    find_package(CUDAToolkit QUIET)
    if(NOT CUDAToolkit_FOUND OR NOT CUDAToolkit_NVCC_EXECUTABLE)
      set(ISOSHARD_WHY_NO_CUDA "no CUDA toolkit with nvcc was found (CUDAToolkit_ROOT names one)")
    else()
      _isoshard_find_nccl()
      if(NOT NCCL_INCLUDE_DIR OR NOT NCCL_LIBRARY)
        set(ISOSHARD_WHY_NO_CUDA "NCCL was not found (libnccl-dev; NCCL_ROOT names its folder)")
      endif()
    endif()
  endif()
  if(ISOSHARD_WHY_NO_CUDA AND ISOSHARD_CUDA STREQUAL "ON")
    message(FATAL_ERROR "ISOSHARD_CUDA=ON: ${ISOSHARD_WHY_NO_CUDA}")
  endif()
endif()

if(ISOSHARD_WHY_NO_CUDA)
  message(STATUS "CUDA and NCCL are left out: ${ISOSHARD_WHY_NO_CUDA}")
else()
  set(ISOSHARD_HAS_CUDA TRUE)
  if(NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER ${CUDAToolkit_NVCC_EXECUTABLE})
  endif()
  if(ISOSHARD_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
  endif()
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES ${ISOSHARD_CUDA_ARCHITECTURES})
  endif()
  enable_language(CUDA)
  # CMake 3.25 knows this of nvcc 12 and not of 13.
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  endif()
  add_library(isoshard_cuda INTERFACE)
  add_library(isoshard::cuda ALIAS isoshard_cuda)
  target_include_directories(isoshard_cuda SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
  target_link_libraries(isoshard_cuda INTERFACE CUDA::cudart)
  add_library(isoshard_nccl_library INTERFACE)
  add_library(isoshard::nccl ALIAS isoshard_nccl_library)
  target_include_directories(isoshard_nccl_library SYSTEM INTERFACE ${NCCL_INCLUDE_DIR})
  target_link_libraries(isoshard_nccl_library INTERFACE ${NCCL_LIBRARY} isoshard::cuda)
  message(STATUS "CUDA ${CUDAToolkit_VERSION} and NCCL (${NCCL_LIBRARY}) are built")
  if(ISOSHARD_WHY_NO_TORCH_CUDA)
    message(STATUS "tensors on CUDA are left out: ${ISOSHARD_WHY_NO_TORCH_CUDA}")
  else()
    set(ISOSHARD_HAS_TORCH_CUDA TRUE)
    add_library(isoshard::libtorch_cuda INTERFACE IMPORTED GLOBAL)
    # --no-as-needed: kernels register themselves in static initializers. One item, as of several
    # flags that isoshard::libtorch has too, CMake keeps one: then the linker leaves CUDA out.
    string(JOIN "," _cuda_libraries -Wl --push-state --no-as-needed ${_torch_lib}/libtorch_cuda.so
      ${_torch_lib}/libc10_cuda.so --pop-state)
    target_link_libraries(isoshard::libtorch_cuda INTERFACE isoshard::libtorch isoshard::cuda
      ${_cuda_libraries})
  endif()
endif()

# isoshard_cuda_library(NAME [TORCH] HEADERS ... SOURCES ... [KERNELS file.cu ...] [DEPS ...])
#   An isoshard_library() that sees the runtime of CUDA (TORCH: and a CUDA LibTorch), and kernels.
#   Does nothing where that is not built: ask ISOSHARD_HAS_CUDA, or ISOSHARD_HAS_TORCH_CUDA.
#   Kernels see the headers of the tree and of CUDA only, and none that includes fmt or ATen. Code
#   of both sides goes into constexpr functions, or such with ISOSHARD_HOST_DEVICE
#   (core/base/host_device.h), which tests of the CPU hold to their contracts.
function(isoshard_cuda_library name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "TORCH" "" "HEADERS;SOURCES;KERNELS;DEPS")
  if(ARG_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "isoshard_cuda_library(${name}): unknown ${ARG_UNPARSED_ARGUMENTS}")
  endif()
  if(NOT ISOSHARD_HAS_CUDA OR (ARG_TORCH AND NOT ISOSHARD_HAS_TORCH_CUDA))
    return()
  endif()
  set(torch)
  set(deps ${ARG_DEPS} isoshard::cuda)
  if(ARG_TORCH)
    set(torch TORCH)
    list(APPEND deps isoshard::libtorch_cuda)
  endif()
  isoshard_library(${name} ${torch} INTERNAL
    HEADERS ${ARG_HEADERS} SOURCES ${ARG_SOURCES} DEPS ${deps})
  if(NOT ARG_KERNELS)
    return()
  endif()
  # A target of their own: the options of isoshard::options are not nvcc's.
  set(kernels isoshard_${name}_kernels)
  add_library(${kernels} OBJECT ${ARG_KERNELS})
  set_target_properties(${kernels} PROPERTIES UNITY_BUILD OFF CUDA_STANDARD 20
    CUDA_STANDARD_REQUIRED ON POSITION_INDEPENDENT_CODE ON)
  target_include_directories(${kernels} PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/src)
  # --fmad=false: results must not depend on whether a compiler fuses a multiply and an add.
  # --expt-relaxed-constexpr: constexpr functions of the tree are device functions too.
  target_compile_options(${kernels} PRIVATE --fmad=false --expt-relaxed-constexpr
    -Xcompiler=-ffp-contract=off,-Wall,-Wextra,-Wshadow -Werror=cross-execution-space-call)
  target_sources(isoshard_${name} PRIVATE $<TARGET_OBJECTS:${kernels}>)
endfunction()

# isoshard_gpu_test(SUITES "Suite" "Suite:label,label" ... [SOURCES ...] [DEPS ...] [LABELS ...]
#                   [RANKS n...] [TIMEOUT s])
#   Adds sources and suites to the one program that holds all tests of GPUs, isoshard_gpu_test, and
#   for each suite an entry gpu.Suite with label gpu, which needs a GPU for each rank of its largest
#   world (labels world2, ...). RANKS: an entry gpu.Suite.nN for each number, whose N ranks are
#   processes that live for all of its tests (PROGRAM --ranks=N).
#   Where the build has no CUDA, or the machine no GPU, entries are skipped with the reason; with
#   ISOSHARD_REQUIRE_GPU=1 in the environment they fail.
function(isoshard_gpu_test)
  cmake_parse_arguments(PARSE_ARGV 0 ARG "" "TIMEOUT" "SUITES;SOURCES;DEPS;LABELS;RANKS")
  if(ARG_UNPARSED_ARGUMENTS OR (NOT ARG_SUITES AND NOT ARG_SOURCES))
    message(FATAL_ERROR "isoshard_gpu_test: needs SUITES; unknown: ${ARG_UNPARSED_ARGUMENTS}")
  endif()
  if(NOT ISOSHARD_BUILD_TESTS)
    return()
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 600)
  endif()
  foreach(source IN LISTS ARG_SOURCES)
    cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
    set_property(GLOBAL APPEND PROPERTY ISOSHARD_GPU_SOURCES ${source})
  endforeach()
  set_property(GLOBAL APPEND PROPERTY ISOSHARD_GPU_DEPS ${ARG_DEPS})
  set(program "")
  if(ISOSHARD_HAS_TORCH_CUDA)
    set(program $<TARGET_FILE:isoshard_gpu_test>)
  endif()
  foreach(entry IN LISTS ARG_SUITES)
    string(REPLACE ":" ";" parts "${entry}")
    list(POP_FRONT parts suite)
    string(REPLACE "," ";" labels "${parts}")
    set_property(GLOBAL APPEND PROPERTY ISOSHARD_GPU_SUITES ${suite})
    if(ARG_RANKS)
      foreach(ranks IN LISTS ARG_RANKS)
        _isoshard_gpu_entry(gpu.${suite}.n${ranks} ${ranks} --ranks=${ranks})
      endforeach()
    else()
      set(sizes world1 ${labels} ${ARG_LABELS})
      list(FILTER sizes INCLUDE REGEX "^world[0-9]+$")
      list(SORT sizes COMPARE NATURAL)
      list(POP_BACK sizes largest)
      string(REPLACE "world" "" largest ${largest})
      _isoshard_gpu_entry(gpu.${suite} ${largest})
    endif()
  endforeach()
endfunction()

# With what isoshard_gpu_test() knows of a suite.
function(_isoshard_gpu_entry entry num_gpus)
  set(why "${ISOSHARD_WHY_NO_CUDA}")
  if(NOT why)
    set(why "${ISOSHARD_WHY_NO_TORCH_CUDA}")
  endif()
  add_test(NAME ${entry}
    COMMAND bash ${PROJECT_SOURCE_DIR}/cmake/checks/gpu_test.sh
      "${why}" ${program} ${ARGN}
      --gtest_filter=${suite}.*:*/${suite}.*
      --gtest_output=xml:${PROJECT_BINARY_DIR}/junit/${entry}.xml)
  set_tests_properties(${entry} PROPERTIES LABELS "gpu;${ARG_LABELS};${labels}"
    ISOSHARD_SUITES "${suite}" TIMEOUT ${ARG_TIMEOUT} SKIP_RETURN_CODE 77
    RESOURCE_GROUPS "${num_gpus},gpus:1")
endfunction()

# isoshard_carry_libraries(TARGET)
#   A program for hosts that have GPUs and a PyTorch, and no packages of our libraries: it needs
#   LibTorch, CUDA and NCCL only. fmt, OpenSSL, Boost and xxhash are in it; PNG figures (cairo) and
#   backend mpi are not: it says so where they are asked for. Archives come before shared libraries,
#   of which --as-needed then leaves out those that nothing calls. LibTorch's folder is found by the
#   run path of the build, or by LD_LIBRARY_PATH.
#   An entry TARGET.libraries reads its dynamic section and its size.
function(isoshard_carry_libraries target)
  if(NOT TARGET isoshard_carried)
    add_library(isoshard_carried OBJECT ${PROJECT_SOURCE_DIR}/cmake/static_fmt.cc
      ${PROJECT_SOURCE_DIR}/harness/plot/no_png_canvas.cc
      ${PROJECT_SOURCE_DIR}/src/core/comm/mpi/no_mpi.cc)
    set_target_properties(isoshard_carried PROPERTIES UNITY_BUILD OFF)
    target_link_libraries(isoshard_carried PRIVATE isoshard::options)
  endif()
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:isoshard_carried>)
  target_link_options(${target} PRIVATE LINKER:--as-needed)
  foreach(archive libxxhash.a libcrypto.a libboost_program_options.a)
    find_library(ISOSHARD_${archive} ${archive})
    if(ISOSHARD_${archive})
      target_link_options(${target} PRIVATE ${ISOSHARD_${archive}})
    endif()
  endforeach()
  add_test(NAME ${target}.libraries
    COMMAND bash ${PROJECT_SOURCE_DIR}/cmake/checks/check_gpu_program.sh $<TARGET_FILE:${target}>
      libtorch_cuda.so libc10_cuda.so)
  set_tests_properties(${target}.libraries PROPERTIES LABELS "unit;structure" TIMEOUT 600)
endfunction()

# isoshard_gpu_test_program(): the program, made when all folders have said what is in it.
function(isoshard_gpu_test_program)
  get_property(sources GLOBAL PROPERTY ISOSHARD_GPU_SOURCES)
  get_property(deps GLOBAL PROPERTY ISOSHARD_GPU_DEPS)
  get_property(suites GLOBAL PROPERTY ISOSHARD_GPU_SUITES)
  if(NOT ISOSHARD_BUILD_TESTS OR NOT ISOSHARD_HAS_TORCH_CUDA OR NOT sources)
    return()
  endif()
  list(REMOVE_DUPLICATES sources)
  list(REMOVE_DUPLICATES deps)
  add_executable(isoshard_gpu_test ${sources})
  # Its files come from many folders, which do not know each other's names.
  set_target_properties(isoshard_gpu_test PROPERTIES UNITY_BUILD OFF
    RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  target_link_libraries(isoshard_gpu_test PRIVATE isoshard::options fmt::fmt ${deps}
    isoshard::libtorch_cuda nlohmann_json::nlohmann_json GTest::gmock GTest::gtest)
  _isoshard_reuse_pch(isoshard_gpu_test)
  isoshard_carry_libraries(isoshard_gpu_test)
  _isoshard_suites_check(isoshard_gpu_test ${suites})
endfunction()
