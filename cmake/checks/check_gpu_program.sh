#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fails if a program needs more than LibTorch, CUDA, NCCL and what every Linux has, or has more than
# 40 MB without its symbols: it must run on a GPU host that has only a PyTorch. Fails, too, if it
# does not need each LIBRARY: a program that the linker left LibTorch's CUDA out of finds no GPU.
# usage: check_gpu_program.sh PROGRAM [LIBRARY...]
set -euo pipefail
readonly kMostBytes=$((40 * 1000 * 1000))
program=$1
shift
allowed='^(libtorch(_cpu|_cuda)?|libc10(_cuda)?|libcudart|libnccl|libstdc\+\+|libgcc_s|libm|libc|'
allowed+='libdl|librt|libpthread|ld-linux-x86-64)\.so(\.[0-9.]+)?$'
needed=$(readelf -d "$program" | sed -n 's/.*(NEEDED).*\[\(.*\)\].*/\1/p')
[[ -n $needed ]] || { echo "$program needs no library: is it a program?"; exit 1; }
code=0
while read -r library; do
  if [[ ! $library =~ $allowed ]]; then
    echo "$program must need LibTorch, CUDA and NCCL only, and needs $library"
    code=1
  fi
done <<<"$needed"
for library in "$@"; do
  grep -qxF -- "$library" <<<"$needed" && continue
  echo "$program must need $library, and needs ${needed//$'\n'/ }"
  code=1
done
stripped=$(mktemp)
trap 'rm -f -- "$stripped"' EXIT
strip -o "$stripped" -- "$program"
bytes=$(stat -c %s -- "$stripped")
if ((bytes > kMostBytes)); then
  echo "$program must have at most $kMostBytes bytes when it is stripped, and has $bytes"
  code=1
fi
echo "$program: $bytes bytes stripped; needs ${needed//$'\n'/ }"
exit $code
