#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Four processes with one host name in two containers: mount namespaces with a /dev/shm of 16 MiB
# each. usage: containers_test.sh PROGRAM MPIRUN...
# Leaves with 77, ctest's skip, where such namespaces cannot be made.
set -euo pipefail
program=$1
shift
if [[ ${1-} == --inside ]]; then
  # As rank OMPI_COMM_WORLD_RANK: the namespace of the first of each two makes it.
  number=$((OMPI_COMM_WORLD_RANK / 2))
  shift
  if ((OMPI_COMM_WORLD_RANK % 2 == 0)); then
    exec unshare --mount --propagation private bash -c '
      mount -t tmpfs -o size=16m tmpfs /dev/shm
      echo $$ >"$0/container$1.new" && mv "$0/container$1.new" "$0/container$1"
      shift; exec "$@"' "$FOLDER" "$number" "$program" "$@"
  fi
  until [[ -s $FOLDER/container$number ]]; do sleep 0.01; done
  exec nsenter --mount="/proc/$(<"$FOLDER/container$number")/ns/mnt" -- "$program" "$@"
fi
[[ $(id -u) == 0 ]] || { echo "skipped: mount namespaces need root"; exit 77; }
unshare --mount --propagation private mount -t tmpfs tmpfs /dev/shm 2>/dev/null ||
  { echo "skipped: no mount namespaces here"; exit 77; }
FOLDER=$(mktemp -d)
export FOLDER
trap 'rm -rf -- "$FOLDER"' EXIT
# MPI itself must not count on a common /dev/shm.
ISOSHARD_EXPECTED_HOSTS=2 "$@" --mca btl tcp,self -n 4 bash "$0" "$program" --inside \
  --expect-world-size=4 --gtest_filter='*OfOneName*:*FolderOfSegments*' >"$FOLDER/output" 2>&1 ||
  { cat "$FOLDER/output"; exit 1; }
grep -q 'PASSED.*3 tests' "$FOLDER/output" || { cat "$FOLDER/output"; exit 1; }
