#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# gpu_test.sh skips with the reason, fails where a GPU is required, and hands on every other end.
# usage: gpu_test_test.sh GPU_TEST
set -uo pipefail
gpu_test=$1
failures=0
unset ISOSHARD_REQUIRE_GPU

expect() {  # EXIT_CODE OUTPUT_PART COMMAND...
  local code=0 output want_code=$1 want_part=$2
  shift 2
  output=$("$@" 2>&1) || code=$?
  [[ $code -eq $want_code && $output == *"$want_part"* ]] && return
  printf 'FAILED: %s\n  exit code %s, expected %s; output, expected to hold "%s":\n%s\n' \
    "$*" "$code" "$want_code" "$want_part" "$output"
  failures=$((failures + 1))
}

expect 77 "skipped: this build has no CUDA: no nvcc" bash "$gpu_test" "no nvcc" --gtest_filter=x
expect 1 "FAILED: ISOSHARD_REQUIRE_GPU=1, and this build has no CUDA: no nvcc" \
  env ISOSHARD_REQUIRE_GPU=1 bash "$gpu_test" "no nvcc" --gtest_filter=x
expect 77 "no driver
skipped: this machine has no GPU" bash "$gpu_test" "" bash -c 'echo no driver; exit 77'
expect 1 "FAILED: ISOSHARD_REQUIRE_GPU=1, and this machine has no GPU" \
  env ISOSHARD_REQUIRE_GPU=1 bash "$gpu_test" "" bash -c 'exit 77'
expect 0 "ran with a b" bash "$gpu_test" "" bash -c 'echo "ran with $*"' program a b
expect 1 "" bash "$gpu_test" "" bash -c 'exit 1'
expect 3 "" env ISOSHARD_REQUIRE_GPU=1 bash "$gpu_test" "" bash -c 'exit 3'
exit $((failures > 0))
