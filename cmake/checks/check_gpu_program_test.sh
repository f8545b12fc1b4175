#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_gpu_program.sh passes what needs LibTorch and the system only, and names what needs more or
# lacks what it must need.
# usage: check_gpu_program_test.sh ISOSHARD   (the program of a build for CPUs)
set -uo pipefail
check=$(dirname -- "${BASH_SOURCE[0]}")/check_gpu_program.sh
failed() { echo "FAILED: $*"; exit 1; }

output=$(bash "$check" "$(type -P true)") || failed "a program of libc alone is refused: $output"
[[ $output == *"bytes stripped"* ]] || failed "the size is not told: $output"

output=$(bash "$check" "$1") && failed "a program that needs cairo is not refused"
[[ $output == *"needs libcairo.so.2"* ]] || failed "cairo is not named: $output"
[[ $output != *"and needs libtorch_cpu.so"* ]] || failed "LibTorch is refused: $output"

output=$(bash "$check" "$(type -P true)" libc.so.6 libtorch_cuda.so) &&
  failed "a program that lacks LibTorch's CUDA is not refused"
[[ $output == *"must need libtorch_cuda.so, and needs libc.so.6"* ]] || failed "not told: $output"
[[ $output != *"must need libc.so.6"* ]] || failed "what is needed is missed: $output"

bash "$check" /dev/null >/dev/null 2>&1 && failed "what is no program is not refused"
exit 0
