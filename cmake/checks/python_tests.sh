#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests of the Python package, for ctest.
# usage: python_tests.sh PYTHON_FOLDER MARKERS [PYTEST OPTIONS]
#
# They run with the Python of ISOSHARD_PYTHON, else with python3. Exit code 77, which ctest counts
# as a skip, if that Python cannot import torch or pytest; ISOSHARD_PYTHON that is no Python, or no
# test selected, is a failure.
set -euo pipefail
readonly kSkipped=77
folder=$1 markers=$2
shift 2

python=${ISOSHARD_PYTHON:-python3}
if ! command -v "$python" >/dev/null; then
  if [[ -n ${ISOSHARD_PYTHON:-} ]]; then
    echo "ISOSHARD_PYTHON must be a Python, got $ISOSHARD_PYTHON, which is not there"
    exit 1
  fi
  echo "SKIPPED: no python3; set ISOSHARD_PYTHON to a Python with torch and pytest"
  exit $kSkipped
fi
for module in torch pytest; do
  # Whether it is there is asked without importing it, which takes seconds.
  if ! "$python" -c "import importlib.util as u; exit(u.find_spec('$module') is None)"; then
    echo "SKIPPED: $python has no $module; set ISOSHARD_PYTHON to a Python with torch and pytest"
    exit $kSkipped
  fi
done

cd -- "$folder"
export PYTHONPATH=$folder/src${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
# Only the plugin of this tree: an installed package may bring another version of it.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
# -rs: what is skipped within is listed with its reason.
# What scripts and torchrun leave in the temporary folder goes with it.
TMPDIR=$(mktemp -d)
export TMPDIR
trap 'rm -rf -- "$TMPDIR"' EXIT
"$python" -m pytest -q -rs -p no:cacheprovider -p isoshard.pytest_plugin -m "$markers" "$@"
