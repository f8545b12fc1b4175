#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Test programs on ranks that mpirun starts: the same tests, what does not fit is skipped, and
# GoogleTest's flags mean on all processes what they mean on one.
# usage: attached_tests_test.sh PROGRAM FOLDER MPIRUN [ARGUMENTS of mpirun]
set -uo pipefail
program=$1 folder=$2
shift 2
mpirun=("$@")
rm -rf -- "$folder"
mkdir -p -- "$folder"
failures=0
unset GTEST_TOTAL_SHARDS GTEST_SHARD_INDEX
unset ISOSHARD_WHOLE_SUITE ISOSHARD_WORLD_SIZES ISOSHARD_LISTED_SUITES

run() {  # NAME EXIT_CODE COMMAND...
  local name=$1 expected=$2 code=0
  shift 2
  "$@" >"$folder/$name.txt" 2>&1 </dev/null || code=$?
  [ "$code" -eq "$expected" ] && return
  echo "$name: exit code $code, expected $expected: $*"
  tail -n 20 "$folder/$name.txt"
  failures=$((failures + 1))
}
expect() {  # NAME PATTERN
  grep -qE -- "$2" "$folder/$1.txt" && return
  echo "$1: nothing matches '$2':"
  tail -n 20 "$folder/$1.txt"
  failures=$((failures + 1))
}
count() {  # NAME PATTERN
  grep -cE -- "$2" "$folder/$1.txt"
}

run three 0 "${mpirun[@]}" -n 3 "$program" --gtest_color=no --attach --expect-world-size=3
expect three ' worlds on the 3 processes of mpirun'
[ "$(count three 'SKIPPED')" -eq 0 ] || { echo "three: tests were skipped"; failures=1; }
run two 0 "${mpirun[@]}" -n 2 "$program" --gtest_color=no --attach --gtest_repeat=2 --gtest_shuffle
expect two 'a world of 3 ranks, and mpirun started 2; start more with -n'
expect two 'Repeating all tests \(iteration 2\)'
expect two 'Randomizing tests.* seed of'

total=$(count three '^\[ +OK ')
seen=0
for shard in 0 1; do
  run "shard$shard" 0 env GTEST_TOTAL_SHARDS=2 GTEST_SHARD_INDEX=$shard "${mpirun[@]}" \
    -n 3 "$program" --gtest_color=no --attach
  seen=$((seen + $(count "shard$shard" '^\[ +OK ')))
done
[ "$total" -gt 1 ] && [ "$seen" -eq "$total" ] ||
  { echo "two shards ran $seen tests of $total"; failures=$((failures + 1)); }

run wrong_size 2 "${mpirun[@]}" -n 2 "$program" --gtest_color=no --attach --expect-world-size=3
expect wrong_size 'must have 3 ranks .*got 2; start it with mpirun -n 3'
run alone 2 env -u OMPI_COMM_WORLD_SIZE "$program" --gtest_color=no --attach
expect alone 'mpirun'
run differ 2 "${mpirun[@]}" -n 1 "$program" --gtest_color=no --attach '--gtest_filter=Col*' : \
  -n 1 "$program" --gtest_color=no --attach '--gtest_filter=Row*'
expect differ 'all processes must run the same tests'
exit $((failures > 0))
