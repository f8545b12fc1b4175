#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The build for PyTorch users: it must be configured without LibTorch, GoogleTest, cairo and
# toml++, build isoshard-judge and libisoshard_ranks.so, and compile nothing that sees ATen. The
# build of the program must bring both, too.
# usage: judge_only_test.sh SOURCE BUILD FOLDER COMPILER   (FOLDER is emptied first)
set -euo pipefail
source=$1 build=$2 work=$3 compiler=$4
rm -rf -- "$work"
mkdir -p -- "$work"
failures=0
failed() { echo "FAILED: $*"; failures=$((failures + 1)); }

hidden=()
for package in LibTorch GTest Cairo TomlPlusPlus MPI; do
  hidden+=("-DCMAKE_DISABLE_FIND_PACKAGE_$package=ON")
done
HOME=$work XDG_CACHE_HOME=$work/cache cmake -G Ninja -S "$source" -B "$work/build" \
  -DISOSHARD_JUDGE_ONLY=ON -DCMAKE_CXX_COMPILER="$compiler" -DLIBTORCH_ROOT=/nonexistent \
  "${hidden[@]}" >"$work/log" 2>&1 \
  || { cat -- "$work/log"; echo "FAILED: it is not configured without LibTorch"; exit 1; }
plan=$(ninja -C "$work/build" -n -v)
[[ $plan == *bin/isoshard-judge* ]] || failed "isoshard-judge is not built by default"
[[ $plan == *bin/libisoshard_ranks.so* ]] || failed "libisoshard_ranks.so is not built by default"
[[ $plan != *subjects* && $plan != *pch.h* ]] || failed "it compiles more than the judge"

# Of each program what must be built before it.
[[ $(ninja -C "$build" -t query bin/isoshard) == *isoshard-judge* ]] \
  || failed "bin/isoshard is built without isoshard-judge"
[[ $(ninja -C "$build" -t query bin/isoshard-judge) == *libisoshard_ranks.so* ]] \
  || failed "isoshard-judge is built without libisoshard_ranks.so"
((failures == 0)) || exit 1
rm -rf -- "$work"
echo "all passed"
