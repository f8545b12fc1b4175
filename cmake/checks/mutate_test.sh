#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs mutate_test.py by a Python that has libclang's bindings, if there is one.
# usage: mutate_test.sh COMPILER FOLDER
set -euo pipefail
here=$(cd -- "${BASH_SOURCE[0]%/*}" && pwd -P)
for python in "${ISOSHARD_PYTHON:-python3}" python3 /usr/bin/python3; do
  "$python" -c 'import clang.cindex' 2>/dev/null && exec "$python" "$here/mutate_test.py" "$@"
done
command -v python3 >/dev/null || { echo "SKIPPED: no python3, which runs tools/mutate"; exit 77; }
exec python3 "$here/mutate_test.py" "$@"
