#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# .ci/wheel, three times (a race once made it fail now and then), and the unpacked wheel, which must
# find isoshard-judge and its library without any environment variable.
# usage: wheel_test.sh SOURCE JUDGE FOLDER   (FOLDER is emptied first)
#
# Exit code 77, which ctest counts as a skip, if the Python of ISOSHARD_PYTHON (else python3) lacks
# pip, setuptools, wheel or torch: nothing is downloaded.
set -euo pipefail
source=$1 judge=$2 work=$3
python=${ISOSHARD_PYTHON:-python3}
for module in pip setuptools wheel torch; do
  "$python" -c "import importlib.util as u; exit(u.find_spec('$module') is None)" || {
    echo "SKIPPED: $python has no $module; set ISOSHARD_PYTHON to a Python that has it"
    exit 77
  }
done
rm -rf -- "$work"
mkdir -p -- "$work"
for try in 1 2 3; do
  wheel=$(ISOSHARD_JUDGE=$judge "$source/.ci/wheel" "$work/$try" --no-build-isolation)
  [[ -f $wheel ]] || { echo "FAILED: try $try printed '$wheel', which is no file"; exit 1; }
done
"$python" -m zipfile -e "$wheel" "$work/site"
chmod -R u+x -- "$work/site/isoshard/bin"  # unpacked by zipfile, not by pip
program=$(env -i PATH=/usr/bin:/bin PYTHONPATH="$work/site" "$(command -v "$python")" \
  -c 'from isoshard import _program; print(_program.find())')
[[ $program == "$work/site/"* ]] || { echo "FAILED: it finds $program"; exit 1; }
env -i "$program" --version
rm -rf -- "$work"
echo "all passed"
