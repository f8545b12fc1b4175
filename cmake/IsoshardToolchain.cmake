# SPDX-License-Identifier: Apache-2.0
# Build type, compiler cache, linker, and the one interface target that carries language level,
# warnings and sanitizers.
include_guard(GLOBAL)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
# -O1 for the bulk of the code and for tests: the optimizer is most of what a file costs to compile.
# Libraries where runs spend their time are HOT (-O2, IsoshardTargets), and kernels ask for -O3.
set(CMAKE_CXX_FLAGS_RELEASE "-O1 -DNDEBUG")
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_CXX_EXTENSIONS OFF)

find_program(ISOSHARD_CCACHE ccache)
if(ISOSHARD_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # A precompiled header is only cached when ccache may ignore its macros and times. The base
  # folder (the environment's, or
  # the tree) makes paths below it relative, so that another clone finds what this one compiled.
  set(_isoshard_ccache_base ${PROJECT_SOURCE_DIR})
  if(DEFINED ENV{CCACHE_BASEDIR})
    set(_isoshard_ccache_base $ENV{CCACHE_BASEDIR})
  endif()
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      CCACHE_BASEDIR=${_isoshard_ccache_base} CCACHE_NOHASHDIR=1 CCACHE_PCH_EXTSUM=1
      ${ISOSHARD_CCACHE})
endif()

add_library(isoshard_options INTERFACE)
add_library(isoshard::options ALIAS isoshard_options)
target_compile_features(isoshard_options INTERFACE cxx_std_20)
# -fPIC everywhere (not CMake's PIE/PIC split) so that one precompiled header serves libraries and
# programs.
# -ffp-contract=off: results must not depend on whether a compiler fuses a multiply and an add.
# Warnings, debug lines and the linker are ours; a project that links the installed package chooses
# its own.
target_compile_options(isoshard_options INTERFACE -fPIC -ffp-contract=off
  "$<BUILD_INTERFACE:-g1;-Wall;-Wextra;-Wpedantic;-Wshadow;-Wnon-virtual-dtor;\
-Woverloaded-virtual;-Wno-psabi>"
  $<BUILD_INTERFACE:$<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>>)
# GTEST_HAS_PTHREAD: what GTest's package defines for tests; everybody defines it, else a library,
# which does not link
# GTest, could not use the precompiled header (-Winvalid-pch).
target_compile_definitions(isoshard_options INTERFACE FMT_USE_CONSTEVAL=1 GTEST_HAS_PTHREAD=1)
target_include_directories(isoshard_options INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}> $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>
  $<INSTALL_INTERFACE:${ISOSHARD_INSTALL_HEADERS}>
  $<INSTALL_INTERFACE:${ISOSHARD_INSTALL_HEADERS}/src>)

# RunDetail of the compiler, not of the PATH: GCC before 12 does not know mold even where it is
# installed.
include(CheckLinkerFlag)
check_linker_flag(CXX -fuse-ld=mold ISOSHARD_HAS_MOLD)
if(ISOSHARD_HAS_MOLD)
  target_link_options(isoshard_options INTERFACE $<BUILD_INTERFACE:-fuse-ld=mold>)
else()
  check_linker_flag(CXX -fuse-ld=lld ISOSHARD_HAS_LLD)
  if(ISOSHARD_HAS_LLD)
    target_link_options(isoshard_options INTERFACE $<BUILD_INTERFACE:-fuse-ld=lld>)
  endif()
endif()

if(ISOSHARD_SANITIZE)
  target_compile_options(isoshard_options INTERFACE -fsanitize=${ISOSHARD_SANITIZE}
    -fno-omit-frame-pointer -g)
  target_link_options(isoshard_options INTERFACE -fsanitize=${ISOSHARD_SANITIZE})
endif()

# What is counted are the libraries of src and harness (IsoshardTargets).
if(ISOSHARD_COVERAGE)
  # end_process() knows it as a weak symbol, for which no linker opens an archive.
  target_link_options(isoshard_options INTERFACE
    $<BUILD_INTERFACE:--coverage;LINKER:--undefined=__gcov_dump>)
endif()

if(ISOSHARD_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES Clang)
    message(FATAL_ERROR "ISOSHARD_FUZZ needs Clang, got ${CMAKE_CXX_COMPILER}; configure with "
      "-DCMAKE_CXX_COMPILER=clang++")
  endif()
  set(instrumented -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined)
  target_compile_options(isoshard_options INTERFACE $<BUILD_INTERFACE:${instrumented}>
    $<BUILD_INTERFACE:-fno-omit-frame-pointer>)
  target_link_options(isoshard_options INTERFACE $<BUILD_INTERFACE:${instrumented}>)
endif()
