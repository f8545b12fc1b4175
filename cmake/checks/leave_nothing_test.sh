#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A test program that passes leaves nothing in the temporary folder: neither what its tests share,
# which nobody destroys, nor what a child that is killed had no time to remove.
# usage: leave_nothing_test.sh FOLDER PROGRAM FILTER
set -euo pipefail
folder=$1 program=$2 filter=$3
rm -rf -- "$folder"
mkdir -p -- "$folder/tmp"
TMPDIR=$folder/tmp "$program" "--gtest_filter=$filter" >"$folder/output" 2>&1 ||
  { cat "$folder/output"; exit 1; }
left=$(ls -A -- "$folder/tmp")
[[ -z $left ]] || { echo "the temporary folder must be empty, got $left"; exit 1; }
rm -rf -- "$folder"
