#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The files of examples/cluster are what their programs read: scripts are bash, and every command of
# isoshard in them has options that it takes.   usage: cluster_examples_test.sh PROGRAM EXAMPLES
set -uo pipefail
program=$1 examples=$2
failures=0 commands=0
fail() { echo "$*"; failures=$((failures + 1)); }

# Prints every command that begins with isoshard, one a line: of scripts with their continued lines,
# of YAML files as a folded text or as a list of arguments.
commands_of() {
  case $1 in
    *.yaml)
      sed -n '/^entrypoint: >-$/,$p' "$1" | tail -n +2 | tr '\n' ' '
      echo
      awk '/^ *- isoshard$/ { inside = 1 } inside && !/^ *- / { exit }
           inside { sub(/^ *- /, ""); gsub(/"/, ""); printf "%s ", $0 }' "$1"
      ;;
    *) sed -e ':a' -e '/\\$/N; s/\\\n//; ta' -e '/^ *#/d' "$1" | grep -oE '(^| )isoshard [a-z].*' ;;
  esac | sed -e 's/^ *//' -e 's/ *$//' | grep -v '^$'
}

for file in "$examples"/*.sh "$examples"/*.sbatch; do
  bash -n "$file" || fail "$file must be bash"
done
for file in "$examples"/*.sh "$examples"/*.sbatch "$examples"/*.yaml; do
  found=0
  while IFS= read -r command; do
    found=$((found + 1))
    command=${command//--attach/}  # joins a job before it reads anything else
    command=$(curves=curves SLURM_JOB_ID=1 bash -c "echo ${command#isoshard}")
    # shellcheck disable=SC2086
    output=$("$program" $command --print-config 2>&1) || fail "$file: isoshard $command: $output"
  done < <(commands_of "$file")
  ((found > 0)) || fail "$file must hold a command of isoshard"
  commands=$((commands + found))
done
# Names of machines and slots, and comments.
if grep -vE '^(#.*|[a-z0-9.-]+ slots=[0-9]+)$' "$examples/hosts"; then
  fail "hosts must hold lines as 'node1 slots=2'"
fi
slots=$(sed -n 's/.* slots=//p' "$examples/hosts" | awk '{ sum += $1 } END { print sum }')
grep -q -- "-n $slots" "$examples/mpirun.sh" ||
  fail "mpirun.sh must start as many ranks as hosts has"
echo "$commands commands"
# The check itself: an option that there is not is found.
"$program" verify --tpp 2 --print-config >/dev/null 2>&1 && fail "an unknown option must be refused"
exit $((failures > 0))
