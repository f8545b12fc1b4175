# SPDX-License-Identifier: Apache-2.0
# Finds a LibTorch (a wheel's torch folder or an unpacked LibTorch archive) and makes
# isoshard::libtorch.
#
# Looked for in LIBTORCH_ROOT (variable, else environment) and nowhere else if that is set,
# otherwise in the launcher's
# per-user cache. Only libtorch_cpu and libc10 are linked: the default build needs no CUDA.
include(FindPackageHandleStandardArgs)

set(ISOSHARD_LIBTORCH_VERSION 2.11.0)
if(DEFINED ENV{XDG_CACHE_HOME})
  set(_isoshard_cache $ENV{XDG_CACHE_HOME}/isoshard)
else()
  set(_isoshard_cache $ENV{HOME}/.cache/isoshard)
endif()
if(LIBTORCH_ROOT)
  set(_libtorch_hints ${LIBTORCH_ROOT})
elseif(NOT "$ENV{LIBTORCH_ROOT}" STREQUAL "")
  set(_libtorch_hints $ENV{LIBTORCH_ROOT})
else()
  set(_libtorch_hints ${_isoshard_cache}/libtorch-${ISOSHARD_LIBTORCH_VERSION}/site/torch)
endif()

find_path(LibTorch_INCLUDE_DIR ATen/ATen.h HINTS ${_libtorch_hints} PATH_SUFFIXES include
  NO_DEFAULT_PATH)
find_library(LibTorch_CPU_LIBRARY torch_cpu HINTS ${_libtorch_hints} PATH_SUFFIXES lib
  NO_DEFAULT_PATH)
find_library(LibTorch_C10_LIBRARY c10 HINTS ${_libtorch_hints} PATH_SUFFIXES lib NO_DEFAULT_PATH)
if(LibTorch_INCLUDE_DIR AND EXISTS ${LibTorch_INCLUDE_DIR}/torch/headeronly/version.h)
  file(STRINGS ${LibTorch_INCLUDE_DIR}/torch/headeronly/version.h _version_line REGEX
    "#define TORCH_VERSION ")
  string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" LibTorch_VERSION "${_version_line}")
endif()

find_package_handle_standard_args(LibTorch
  REQUIRED_VARS LibTorch_CPU_LIBRARY LibTorch_C10_LIBRARY LibTorch_INCLUDE_DIR VERSION_VAR
  LibTorch_VERSION
  REASON_FAILURE_MESSAGE
  "run ./isoshard once (it installs the pinned LibTorch), or pass -DLIBTORCH_ROOT=DIR \
with DIR/include and DIR/lib")

if(LibTorch_FOUND AND NOT TARGET isoshard::libtorch)
  get_filename_component(_libtorch_lib ${LibTorch_CPU_LIBRARY} DIRECTORY)
  # Imported: an installed package names it and finds it again on its own machine.
  add_library(isoshard::libtorch INTERFACE IMPORTED GLOBAL)
  # After the system's folders: a LibTorch wheel carries its own fmt (12), whose functions it does
  # not export; <fmt/...> must be
  # the one that is linked.
  target_compile_options(isoshard::libtorch INTERFACE
    "SHELL:-idirafter \"${LibTorch_INCLUDE_DIR}\""
    "SHELL:-idirafter \"${LibTorch_INCLUDE_DIR}/torch/csrc/api/include\"")
  target_link_options(isoshard::libtorch INTERFACE LINKER:-rpath,${_libtorch_lib})
  # --no-as-needed: ATen registers its CPU kernels in static initializers that no symbol of ours
  # refers to.
  target_link_libraries(isoshard::libtorch INTERFACE
    -Wl,--push-state,--no-as-needed ${LibTorch_CPU_LIBRARY} ${LibTorch_C10_LIBRARY} -Wl,--pop-state)
endif()
