#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# isoshard bisect on a small repository, with a script in the place of a training run.
# usage: bisect_test.sh PROGRAM FOLDER
set -euo pipefail
program=$1 folder=$2
command -v git >/dev/null || { echo "SKIPPED: no git"; exit 77; }
rm -rf -- "$folder"
mkdir -p -- "$folder"
cd -- "$folder"
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
git init -q -b main .
git config user.name test && git config user.email test@isoshard.example
failures=0
expect() {  # WHAT CODE PATTERN COMMAND...
  local what=$1 code=$2 pattern=$3 output got=0
  shift 3
  output=$("$@" 2>&1) || got=$?
  if [[ $got -ne $code ]] || ! grep -qE -- "$pattern" <<<"$output"; then
    echo "$what: must end with $code and say '$pattern', got $got and: $output"
    failures=1
  fi
}
# Commits 1 to 8; from 6 on the run is wrong, and 5 cannot be judged.
for i in 1 2 3 4 5 6 7 8; do
  code=0
  ((i == 5)) && code=4
  ((i > 5)) && code=1
  printf '#!/bin/sh\necho "verdict of %s"\nexit %s\n' "$i" "$code" >run.sh
  chmod +x run.sh
  git add run.sh && git commit -q -m "Make number $i"
  git tag "c$i"
done

# 5 and 6 are left, and 5 says nothing: git cannot tell them apart, and neither do we.
expect 'what cannot be judged' 4 'only .skip.ped commits left' "$program" bisect c1 c8 -- ./run.sh
expect 'the first bad one' 0 'The first commit that is wrong:' "$program" bisect c5 c8 -- sh -c \
  './run.sh; code=$?; [ $code = 4 ] && exit 0; exit $code'
expect 'by its title' 0 'Make number 6' "$program" bisect c5 c8 -- sh -c \
  './run.sh; code=$?; [ $code = 4 ] && exit 0; exit $code'
expect 'and its words' 0 '^  verdict of 6' "$program" bisect c5 c8 -- sh -c \
  './run.sh; code=$?; [ $code = 4 ] && exit 0; exit $code'
expect 'a good end that is bad' 2 'Make number 7 must be good, got exit code 1' \
  "$program" bisect c7 c8 -- ./run.sh
expect 'a bad end that is good' 2 'must be bad, got exit code 0' "$program" bisect c1 c2 -- ./run.sh
expect 'no command' 2 'nothing selected: bisect GOOD BAD -- COMMAND' "$program" bisect c1 c8
expect 'no such commit' 2 'rev-parse' "$program" bisect nowhere c8 -- ./run.sh
expect 'nothing is left behind' 0 '^1$' sh -c 'git worktree list | wc -l'
expect 'nor a bisection' 1 '' git bisect log
expect 'nor another commit' 0 'Make number 8' git log -1
exit $failures
