#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The manual pages and completion scripts that the build made: groff and the shells take them.
# usage: manual_test.sh MANUAL
set -euo pipefail
manual=$1
failures=0
say() { echo "$*"; failures=1; }
for page in isoshard isoshard-verify isoshard-faults isoshard-judge isoshard-judge-compare; do
  [[ -s $manual/man1/$page.1 ]] || say "$page.1 must be made"
done
if command -v groff >/dev/null; then
  for page in "$manual"/man1/*.1; do
    warnings=$(groff -man -Tascii -ww -z "$page" 2>&1 | grep -v 'cannot adjust line' || true)
    [[ -z $warnings ]] || say "$page: $(head -n 3 <<<"$warnings")"
  done
else
  echo "pages were not read: no groff"
fi
bash -n "$manual/bash/isoshard" || say "bash must take its completion"
offered=$(bash -c "source '$manual/bash/isoshard'
  COMP_WORDS=(isoshard ver) COMP_CWORD=1
  _isoshard
  echo \"\${COMPREPLY[@]}\"")
[[ $offered == verify ]] || say "bash must offer verify for 'isoshard ver', got '$offered'"
if command -v zsh >/dev/null; then
  zsh -n "$manual/zsh/_isoshard" || say "zsh must take its completion"
fi
if command -v fish >/dev/null; then
  fish -n "$manual/fish/isoshard.fish" || say "fish must take its completion"
fi
exit $failures
