#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every `./isoshard test ...` on a page, in a workflow and in the output of `isoshard explain`
# selects a test. Nothing is run: names are looked up in the index of tests, cases in the sources.
# usage: test_names_test.sh SOURCE_FOLDER BUILD_FOLDER PROGRAM
set -euo pipefail
source_dir=$1 build_of_tests=$2 app=$3
unset "${!ISOSHARD_@}"
source "$source_dir/isoshard"
build_dir=$build_of_tests
failures=0
failed() {
  echo "FAILED: $*"
  failures=$((failures + 1))
}

declare -A suite_entries=() whole=()
read_tests || { echo "no build in $build_dir"; exit 1; }

# ---- labels --------------------------------------------------------------------------------------

all_labels=$(printf '%s\n' "${test_labels[@]}" | tr ',' '\n' | sed '/^-\{0,1\}$/d' | sort -u)
all_names=$(printf '%s\n' "${test_names[@]}")
all_suites=$(printf '%s\n' "${!suite_entries[@]}" | sort -u)
((${#test_names[@]} > 100 && $(wc -l <<<"$all_suites") > 100)) || failed "the index is too short"
(($(wc -l <<<"$all_labels") <= 60)) \
  || failed "more than 60 labels: $(paste -sd' ' <<<"$all_labels")"
both=$(comm -12 <(echo "$all_labels") <(echo "$all_suites"))
[[ -z $both ]] || failed "suites must be no labels: $both"

# ---- commands ------------------------------------------------------------------------------------

# Suite.Case of every test in the sources.
declare -A cases=() checked=()
while IFS= read -r name; do cases[$name]=1; done < <(
  find "$source_dir"/{src,harness,fixtures,suite,conformance,app,bench,cmake,fuzz} -name '*.cc' \
    -print0 | xargs -0 cat | tr '\n' ' ' | grep -oE '\bTEST(_F|_P)?\( *\w+, *\w+ *\)' \
    | sed -E 's/.*\( *(\w+), *(\w+) *\)/\1.\2/')

# find_problem NAME: sets problem to the reason why `./isoshard test NAME` selects nothing.
find_problem() {
  local pattern item
  problem=''
  if [[ $1 != *[*?:-]* && -n ${cases[$1]:-} && -n ${checked[${1%%.*}]:-} ]]; then return; fi
  select_tests "$1" || { problem="$no_fit fits no suite, program or entry"; return; }
  for pattern in "${positive[@]}"; do
    find_bare_suite "$pattern"
    if ((${#commands[@]})) && [[ $pattern == *.* ]]; then
      item=${pattern#*.}
      fits_any "$bare_suite.${item%%/*}" "${!cases[@]}" || problem="no case fits $pattern"
    fi
    ((${#commands[@]} == 0)) || checked[$bare_suite]=1
  done
}

# check WHERE COMMAND: the words after `./isoshard test`.
check() {
  local words word before='' problem=''
  read -r -a words <<<"$2"
  [[ $2 != *[\'\"]* ]] || mapfile -t words < <(xargs -n 1 printf '%s\n' <<<"$2")
  for word in "${words[@]}"; do
    case $before in
      -L | -LE)
        grep -qE -- "$word" <<<"$all_labels" || failed "$1: no label fits $word"
        before='' && continue ;;
      -R)
        grep -qE -- "$word" <<<"$all_names" || failed "$1: no entry fits $word"
        before='' && continue ;;
      -*) before='' && continue ;;
    esac
    case $word in
      -L | -LE | -R | -j | --resource-spec-file) before=$word ;;
      -* | *NAME* | *SUITE* | '[CTEST' | 'OPTIONS]' | ...) ;;  # placeholders
      *)
        [[ -z ${checked[$word]:-} ]] || continue
        checked[$word]=1
        find_problem "$word"
        [[ -z $problem ]] || failed "$1: ./isoshard test $word: $problem"
        ;;
    esac
  done
}

# commands_of FILE: what follows `./isoshard test` in its code, one a line: to a backtick, a comment
# or the end of the line in a block.
commands_of() {
  awk '
    function take(text,    rest) {
      while (match(text, /\.\/isoshard( --gpu)? test( |$)/)) {
        text = substr(text, RSTART + RLENGTH)
        rest = text
        sub(/  .*|  *#.*|[;&|`].*/, "", rest)
        if (rest != "") print rest
      }
    }
    /^ *```/ { in_block = !in_block; next }
    in_block || /^    / { take($0); next }
    { prose = prose " " $0 }
    END {
      num = split(prose, parts, "`")
      for (i = 2; i <= num; i += 2) {
        gsub(/ +/, " ", parts[i])
        take(parts[i])
      }
    }' "$1"
}

positive=() negative=() commands=() entries=() extra=() no_fit='' bare_suite=''
num_commands=0
while IFS= read -r file; do
  while IFS= read -r command; do
    check "${file#"$source_dir"/}" "$command"
    num_commands=$((num_commands + 1))
  done < <(commands_of "$file")
done < <(cd -- "$source_dir" && find "$PWD"/{README,CONTRIBUTING,CHANGELOG}.md \
  "$PWD"/{docs,examples,python} -name '*.md')
while IFS= read -r words; do
  check .github "${words//[\'\"]/}"
  num_commands=$((num_commands + 1))
done < <(sed -nE 's/.*\.ci\/run (-[^$]*)$/\1/p; s/.*arguments: "(-[^"]*)".*/\1/p' \
  "$source_dir"/.github/workflows/*.yml)
((num_commands > 20)) || failed "only $num_commands commands were found on pages"

mapfile -t ids < <("$app" list contracts | awk '/^[a-z]/ { print $1 }')
mapfile -t -O "${#ids[@]}" ids < <("$app" list faults | awk '/^  [a-z0-9_]+ / { print $1 }')
((${#ids[@]} > 150)) || failed "only ${#ids[@]} contracts and faults were found"
explained=$("$app" explain "${ids[@]}")
of_explain=$(sed -n 's/^ *\.\/isoshard test //p' <<<"$explained")
(($(wc -l <<<"$of_explain") > 300)) || failed "explain prints few commands"
while IFS= read -r command; do
  check "isoshard explain" "$command"
done <<<"$of_explain"
while IFS= read -r fault; do
  [[ " ${ids[*]} " == *" $fault "* ]] || failed "isoshard explain: no fault $fault"
done < <(sed -n 's/^.*\.\/isoshard verify --fault //p' <<<"$explained" | sort -u)

# What is wrong is found.
before=$failures
for wrong in NoSuchSuite TrainCase.NoSuchCase no_such_program '-L no_label' '-R no_entry'; do
  found=$failures
  check control "$wrong" >/dev/null
  ((failures > found)) || { echo "FAILED: a command with $wrong must be found"; before=-1; }
done
((before == 0)) || exit 1
echo "all of $num_commands commands of pages and ${#checked[@]} names select a test"
