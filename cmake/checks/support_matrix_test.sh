#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The page of systems is what its runs say, and rows without a run say so. The versions of
# frameworks are those that their tests install.
# usage: support_matrix_test.sh SOURCE FOLDER
set -euo pipefail
source=$1 folder=$2
command -v python3 >/dev/null || { echo "SKIPPED: no python3, which makes the page"; exit 77; }
tool=$source/tools/support_matrix.py
python3 "$tool" check || exit 1

rm -rf -- "$folder"
mkdir -p -- "$folder/build" "$folder/torch/torch/headeronly"
failures=0
expect() {  # WHAT PATTERN
  grep -qE -- "$2" "$folder/page.md" || {
    echo "$1: nothing matches '$2' in:"
    cat "$folder/page.md"
    failures=1
  }
}
page() { python3 "$tool" "$@" --store "$folder/store.json" --page "$folder/page.md"; }
printf '#define TORCH_VERSION_%s\n' 'MAJOR 2' 'MINOR 11' 'PATCH 0' \
  >"$folder/torch/torch/headeronly/version.h"
cat >"$folder/build/CMakeCache.txt" <<CACHE
CMAKE_CXX_COMPILER:FILEPATH=$folder/c++
LibTorch_INCLUDE_DIR:PATH=$folder/torch
CMAKE_HOME_DIRECTORY:INTERNAL=$source
CACHE
printf '#!/bin/sh\necho "g++ (Some 12.2.0-14) 12.2.0"\n' >"$folder/c++"
chmod +x "$folder/c++"
cat >"$folder/build/ctest.xml" <<'REPORT'
<testsuite><testcase name="a"/><testcase name="b"/>
<testcase name="c"><skipped/></testcase></testsuite>
REPORT
system=$(. /etc/os-release && echo "${NAME/ GNU\/Linux/} $VERSION_ID")
cat >"$folder/store.json" <<STORE
{"wanted": [{"system": "$system", "compiler": "GCC 12", "libtorch": "2.11"},
            {"system": "$system", "compiler": "GCC 1", "libtorch": "2.11"}], "runs": []}
STORE
page page
expect 'nothing ran' "^\| $system \| GCC 12 \| 2.11 \| any \| - \| not run \| - \|$"
page record "$folder/build" --date 2001-02-03
page page
expect 'a run' \
  "^\| $system \| GCC 12.2.0 \| 2.11.0 \| .* \| 2 entries, 1 skipped \| passed \| .*, 2001-02-03"
expect 'GCC 12 is not GCC 1' '\| GCC 1 \| 2.11 \| any \| - \| not run \|'
! grep -q 'GCC 12 |' "$folder/page.md" || { echo "the row must be that of the run"; failures=1; }
sed -i 's|<testcase name="b"/>|<testcase name="b"><failure/></testcase>|' "$folder/build/ctest.xml"
page record "$folder/build" --date 2001-02-04
page page
expect 'the run after it' '\| 1 failed \| .*, 2001-02-04 \|'
[[ $(grep -c '2001-02' "$folder/page.md") -eq 1 ]] || { echo "one run of a system"; failures=1; }

echo 'some-framework==1.2.3  # --no-deps' >"$folder/pins.txt"
pinned() {  # VERSION: exit code and output of check where the page names this version
  cat >"$folder/store.json" <<STORE
{"wanted": [], "runs": [], "frameworks": [
  {"framework": "some-framework", "version": "$1", "judged": "loops", "page": "some.md"},
  {"framework": "not-pinned", "version": "7", "judged": "loops", "page": "some.md"}]}
STORE
  page page
  page check --pins "$folder/pins.txt" >"$folder/problems"
}
pinned 1.2.3 || { echo "versions that are installed must pass"; failures=1; }
expect 'a framework' '^\| some-framework \| 1.2.3 \| loops \| \[some.md\]\(some.md\) \|$'
if pinned 1.2.4; then echo "another version than the installed one must be refused"; failures=1; fi
grep -q 'some-framework must be 1.2.3' "$folder/problems" \
  || { echo "the problem must name both"; failures=1; }
pinned 1.2.3
echo >>"$folder/page.md"
if page check >/dev/null; then echo "a page that was edited must be refused"; failures=1; fi
exit $failures
