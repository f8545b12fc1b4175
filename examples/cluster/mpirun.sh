#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Judges tensor parallelism within each of two machines and data parallelism across them.
#
# isoshard must be at the same path on both machines, built from the same sources, and ssh must not
# ask. By default hosts are filled one after the other, so tp (the fast axis) stays in a machine;
# --map-by node deals ranks out in turn, which puts tp across.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

mpirun --hostfile hosts -n 4 \
  isoshard verify --attach --expect-world-size 4 --subjects autotp,fsdp_tp --tp 2 --dp 2 \
  --output-dir reports

mpirun --hostfile hosts --map-by node -n 4 \
  isoshard verify --attach --expect-world-size 4 --subjects autotp,fsdp_tp --tp 2 --dp 2 \
  --output-dir reports_tp_across
