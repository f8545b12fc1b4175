#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Benchmarks with --attach on two processes of mpirun; those without say why.
# usage: attach_test.sh BUILD_FOLDER MPIRUN...
set -euo pipefail
programs=$1/bin
shift
unset "${!OMPI_COMM_@}" "${!PMIX@}" "${!SLURM_@}" RANK WORLD_SIZE LOCAL_RANK
output=$(mktemp)
trap 'rm -f -- "$output"' EXIT
fail() {
  printf '%s\n' "$1" >&2
  cat "$output" >&2
  exit 1
}
# expect CODE COMMAND...
expect() {
  local code=$1 got=0
  shift
  "$@" >"$output" 2>&1 || got=$?
  [[ $got == "$code" ]] || fail "exit code must be $code, got $got: $*"
}
says() { grep -qE -- "$1" "$output" || fail "must say: $1"; }
says_once() { [[ $(grep -cE -- "$1" "$output") == 1 ]] || fail "must be said once: $1"; }

count=0
for program in "$programs"/bench_* "$programs"/*_bench; do
  [[ -x $program && $program != */tiny_tests_bench ]] || continue # GoogleTest's help
  expect 0 "$program" --help
  says '--attach'
  count=$((count + 1))
done
((count >= 7)) || fail "there must be at least 7 benchmarks, got $count"

expect 0 "$@" -n 2 "$programs/world_bench" --attach 3
says_once '^world with one all-reduce +2 ranks'
expect 0 "$@" -n 2 "$programs/pipeline_bench" --attach 1F1B 2 2
says_once '^1F1B pp 2 x 1 stages, 2 micro-batches: median ratio'
expect 0 "$@" -n 2 "$programs/tiny_tests_bench" --attach --gtest_filter='*/?'
says '10 worlds on the 2 processes of mpirun'
expect 2 "$@" -n 2 "$programs/world_bench" 3
says 'mpirun started 2 processes.*add --attach'
expect 2 "$@" -n 1 "$programs/pipeline_bench" --attach
says_once 'a world of this benchmark has 2 ranks, got 1 at most; start more with mpirun -n'
expect 2 "$programs/bench_all_reduce" --attach
says 'no --attach: it measures shm'
