#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All-reduce of fp32 on shm, mpi (orders ordered and native) and gloo, one after the other in one
# run: a Markdown table a number of ranks, medians in ms, with the ratio to shm behind each.
# usage: all_reduce_table.sh BUILD [PYTHON]   PYTHON has torch; without it there is no column gloo
set -euo pipefail
build=$1 python=${2:-}
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
root=()
[[ $(id -u) != 0 ]] || root=(--allow-run-as-root)
for ranks in 2 4; do
  {
    "$build/bin/bench_all_reduce" "$ranks"
    mpirun "${root[@]}" -n "$ranks" --oversubscribe --bind-to none --mca mpi_yield_when_idle 1 \
      "$build/bin/bench_mpi_backend_all_reduce"
    [[ -z $python ]] || "$python" "$here/gloo_all_reduce.py" "$ranks"
  } | awk -v ranks="$ranks" '
    $1 == "isoshard" && $4 == "fp32" { sizes[++count] = $5; shm[$5] = $8 }
    $3 == "fp32" && $6 == "mpi" { ordered[$4] = $8; native[$4] = $12 }
    $1 == "gloo" && $4 == "fp32" { gloo[$5] = $8 }
    function cell(time, base) {
      return time == "" ? "-" : sprintf("%.3g (%.1f)", time, time / base)
    }
    END {
      printf "| %d ranks | shm | mpi ordered | mpi native | gloo |\n|---|---|---|---|---|\n", ranks
      for (i = 1; i <= count; ++i) {
        size = sizes[i]
        printf "| %s | %.3g | %s | %s | %s |\n",
          size < 1024 ? size " KiB" : size / 1024 " MiB", shm[size],
          cell(ordered[size], shm[size]), cell(native[size], shm[size]), cell(gloo[size], shm[size])
      }
      print ""
    }'
done
