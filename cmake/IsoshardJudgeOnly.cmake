# SPDX-License-Identifier: Apache-2.0
# The build of isoshard-judge and libisoshard_ranks alone: what `./isoshard judge` and `./isoshard
# wheel` need. It finds no LibTorch, so libraries that see ATen are declared and never built.
include_guard(GLOBAL)
set(ISOSHARD_BUILD_TESTS OFF)
add_library(isoshard::libtorch INTERFACE IMPORTED GLOBAL)

add_subdirectory(src/core EXCLUDE_FROM_ALL)
foreach(folder IN ITEMS ids stats trace bundle evidence verdict causes judge ranks checkpoints world
    report cli curve compare)
  add_subdirectory(harness/${folder} EXCLUDE_FROM_ALL)
endforeach()
add_subdirectory(app/judge EXCLUDE_FROM_ALL)
# What is built by default.
add_custom_target(isoshard_judge_only ALL DEPENDS isoshard_judge_app isoshard_ranks_c)
