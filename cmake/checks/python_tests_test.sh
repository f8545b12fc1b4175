#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# python_tests.sh with stand-ins for Python: what is skipped, what fails, what is passed on.
# usage: python_tests_test.sh SCRIPT FOLDER   (FOLDER is emptied first)
set -euo pipefail
script=$1 work=$2
rm -rf -- "$work"
mkdir -p -- "$work"/{tree/src,bin,tmp}
export TMPDIR=$work/tmp
unset ISOSHARD_PYTHON PYTHONPATH
bash=$(command -v bash)
for tool in env dirname; do ln -s "$(command -v $tool)" "$work/bin/$tool"; done

# Has the modules of FAKE_MODULES; pytest ends with FAKE_CODE.
cat >"$work/a python" <<'END'
#!/usr/bin/env bash
if [[ $1 == -c ]]; then
  for module in $FAKE_MODULES; do [[ $2 == *"'$module'"* ]] && exit 0; done
  exit 1
fi
touch "$TMPDIR/left by a script"
echo "[$*] in ${PWD##*/} with ${PYTHONPATH##*/}"
exit "${FAKE_CODE:-0}"
END
chmod +x "$work/a python"

failures=0
# expect CODE OUTPUT_PART VARIABLES...
expect() {
  local code=0 output want_code=$1 want_part=$2
  shift 2
  output=$(env PATH="$work/bin:/usr/bin:/bin" "$@" "$bash" "$script" "$work/tree" "a and b" --one \
    2>&1) || code=$?
  if [[ $code != "$want_code" || $output != *"$want_part"* ]]; then
    printf 'FAILED: %s\n  exit code %s, expected %s; output, expected to hold "%s":\n%s\n' \
      "$*" "$code" "$want_code" "$want_part" "$output"
    failures=$((failures + 1))
  fi
}

python="ISOSHARD_PYTHON=$work/a python"
expect 77 "has no torch" "$python" FAKE_MODULES=pytest
expect 77 "has no pytest" "$python" FAKE_MODULES=torch
expect 1 "ISOSHARD_PYTHON must be a Python" ISOSHARD_PYTHON=/nonexistent FAKE_MODULES=
expect 0 "-m a and b --one] in tree with src" "$python" "FAKE_MODULES=torch pytest"
expect 5 "" "$python" "FAKE_MODULES=torch pytest" FAKE_CODE=5
ln -s "$work/a python" "$work/bin/python3"
expect 0 "-m pytest" "FAKE_MODULES=torch pytest"
[[ -z $(ls -A -- "$work/tmp") ]] ||
  { echo "FAILED: scripts must leave nothing in the temporary folder"; failures=$((failures + 1)); }

((failures == 0)) || { echo "$failures failed"; exit 1; }
rm -rf -- "$work"
echo "all passed"
