#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a test of tools/mutate by a Python that has libclang's bindings, if there is one.
# usage: mutate_test.sh TEST.py COMPILER FOLDER
set -euo pipefail
for python in "${ISOSHARD_PYTHON:-python3}" python3 /usr/bin/python3; do
  "$python" -c 'import clang.cindex' 2>/dev/null && exec "$python" "$@"
done
command -v python3 >/dev/null || { echo "SKIPPED: no python3, which runs tools/mutate"; exit 77; }
exec python3 "$@"
