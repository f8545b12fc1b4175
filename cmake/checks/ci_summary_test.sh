#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What .ci/summary makes of a real report of ctest: worst first, each with its command, within its
# budget.   usage: ci_summary_test.sh SUMMARY FOLDER
set -euo pipefail
summary=$1 folder=$2
command -v python3 >/dev/null || { echo "SKIPPED: no python3, which .ci/summary needs"; exit 77; }
rm -rf -- "$folder"
mkdir -p -- "$folder/junit"
failures=0

expect() {  # WHAT PATTERN TEXT
  if ! grep -qE -- "$2" <<<"$3"; then
    echo "$1: nothing matches '$2' in:"
    echo "$3"
    failures=$((failures + 1))
  fi
}

cat >"$folder/CTestTestfile.cmake" <<'TESTS'
add_test(sums_test.Adds sh -c "echo right")
add_test(sums_test.Rounds sh -c "echo '1 </pre> 2 | 3'; exit 1")
add_test(wide_mpi.n2 false)
add_test(comm_test.Sends sh -c "kill -SEGV $$")
add_test(comm_test.Waits sleep 60)
set_tests_properties(comm_test.Waits PROPERTIES TIMEOUT 1)
add_test(comm_test.Gone /no/such/program)
add_test(python.live sh -c "echo 'SKIPPED: no torch'; exit 77")
set_tests_properties(python.live PROPERTIES SKIP_RETURN_CODE 77)
TESTS
cat >"$folder/junit/sums_test.Rounds.xml" <<'REPORT'
<?xml version="1.0" encoding="UTF-8"?>
<testsuites><testsuite name="Rounds"><testcase name="HalfToEven/bf16" classname="All/Rounds">
<failure message="must be 2, got 3&#x0A;at element 7" type=""/></testcase>
<testcase name="Down" classname="All/Rounds"/></testsuite></testsuites>
REPORT
cat >"$folder/junit/wide_mpi.n2.xml" <<'REPORT'
<testsuites><testsuite name="Sums"><testcase name="Add" classname="Sums">
<failure message="must be 2" type=""/></testcase></testsuite></testsuites>
REPORT
(cd "$folder" && ctest --output-junit ctest.xml --output-log ctest.log >/dev/null 2>&1) || true

text=$("$summary" "$folder" --title "a <title>")
expect title '^## a &lt;title&gt;: 5 of 7 failed$' "$text"
expect numbers '^7 selected, 5 ran, 1 crashed, 1 timed out, 1 not run, 2 failed, 1 skipped' "$text"
order=$(grep -oE '^### (comm|sums)_test\.[A-Za-z]+' <<<"$text" | tr '\n' ' ')
expect order '^### comm_test.Sends ### comm_test.Waits ### comm_test.Gone ### sums_test.Rounds $' \
  "$order"
expect command '^<pre>./isoshard test All/Rounds.HalfToEven/bf16$' "$text"
expect 'command of an entry' '^<pre>./isoshard test comm_test.Sends</pre>$' "$text"
expect 'command of a world' '^<pre>./isoshard test wide_mpi.n2$' "$text"
expect 'its program' \
  '^mpirun .*-n 2 .*tests/wide_mpi --expect-world-size=2 --gtest_filter=Sums.Add' "$text"
expect filter 'tests/sums_test --gtest_filter=All/Rounds.HalfToEven/bf16' "$text"
expect message 'must be 2, got 3' "$text"
expect skip '^- python.live: SKIPPED: no torch$' "$text"
[[ $text != *All/Rounds.Down* ]] || { echo "a case that passed is listed"; failures=1; }

# A failure outside of any test is repeated with the whole entry.
cat >"$folder/junit/sums_test.Rounds.xml" <<'REPORT'
<?xml version="1.0" encoding="UTF-8"?>
<testsuites><testsuite name="NonTestSuiteFailure"><testcase name="" classname="">
<failure message="no weights" type=""/></testcase></testsuite></testsuites>
REPORT
text=$("$summary" "$folder")
expect 'command of an entry, outside' '^<pre>./isoshard test sums_test.Rounds</pre>$' "$text"
expect outside '^<b>outside of any test</b>$' "$text"

# Where GoogleTest left no report, the output is shown; it cannot end the block that it is in.
rm -- "$folder/junit/sums_test.Rounds.xml"
expect output '1 &lt;/pre&gt; 2' "$("$summary" "$folder")"

# What GitHub shows beside the code: worst first, at the assertion's line, no line of a message a
# command of its own.
cat >"$folder/junit/sums_test.Rounds.xml" <<'REPORT'
<?xml version="1.0" encoding="UTF-8"?>
<testsuites><testsuite name="Rounds"><testcase name="Down" classname="Rounds">
<failure message="/tree/harness/stats/sums_test.cc:12&#x0A;::error::100 %" type=""/></testcase>
</testsuite></testsuites>
REPORT
marks=$("$summary" "$folder" --output /dev/null --annotate)
expect annotation \
  '^::error file=harness/stats/sums_test.cc,line=12,title=sums_test.Rounds%3A failed' "$marks"
expect 'one line' '%0A::error::100 %25$' "$marks"
expect 'without a place' '^::error title=comm_test.Sends%3A crashed::' "$marks"
expect 'worst first' 'comm_test.Sends' "$(head -n 1 <<<"$marks")"
expect 'how many' '^5$' "$(grep -c '^::error ' <<<"$marks")"
mkdir -p -- "$folder/many"
for i in $(seq 14); do echo "add_test(many.$i false)"; done >"$folder/many/CTestTestfile.cmake"
(cd "$folder/many" && ctest --output-junit ctest.xml >/dev/null 2>&1) || true
many=$("$summary" "$folder/many" --output /dev/null --annotate)
expect 'budget of annotations' '^10$' "$(grep -c '^::error ' <<<"$many")"
expect 'what is left' '^::error title=5 more failures::' "$many"

# Without ctest's log a crash is a failure like others.
rm -- "$folder/ctest.log"
expect 'no log' '^### comm_test.Sends: failed$' "$("$summary" "$folder")"

# What has no room is still named.
short=$("$summary" "$folder" --budget 700)
expect budget 'more, without room for their output' "$short"
expect named '^- sums_test.Rounds: failed' "$short"
((${#short} <= 700)) || { echo "the budget is 700 bytes, got ${#short}"; failures=1; }

"$summary" "$folder" --output "$folder/page"
"$summary" "$folder" --output "$folder/page"
expect appended '^2$' "$(grep -c '^## ' "$folder/page")"
expect missing 'no tests ran' "$("$summary" "$folder/nowhere")"
echo '<half' >"$folder/ctest.xml"
code=0
"$summary" "$folder" >/dev/null 2>&1 || code=$?
expect broken '^2$' "$code"
exit $((failures > 0))
