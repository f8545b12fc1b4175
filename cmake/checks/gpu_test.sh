#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a test that needs a GPU. Where it cannot run, it is skipped (exit code 77) with the reason;
# with ISOSHARD_REQUIRE_GPU=1 that is a failure (1).
# usage: gpu_test.sh WHY_NOT_BUILT PROGRAM [ARGUMENTS]
# PROGRAM ends with 77 where it finds no GPU.
set -uo pipefail
why=$1
shift
code=77
if [ -z "$why" ]; then
  code=0
  "$@" || code=$?
  why="this machine has no GPU that CUDA can use (the lines above say why)"
else
  why="this build has no CUDA: $why"
fi
[ "$code" -eq 77 ] || exit "$code"
if [ "${ISOSHARD_REQUIRE_GPU:-0}" = 1 ]; then
  echo "FAILED: ISOSHARD_REQUIRE_GPU=1, and $why"
  exit 1
fi
echo "skipped: $why"
exit 77
