#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Judges tensor parallelism within each of two machines and data parallelism across them.
#
# isoshard must be at the same path on both machines, built from the same sources, and ssh must not
# ask. By default hosts are filled one after the other, so tp (the fast axis) stays in a machine;
# --map-by node deals ranks out in turn, which puts tp across.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
# A host that is not there, or goes away, is noticed within 20 s.
launch=(mpirun --hostfile hosts --mca plm_rsh_args "-o ConnectTimeout=10"
  --mca oob_tcp_keepalive_time 10 --mca oob_tcp_keepalive_intvl 2 --mca oob_tcp_keepalive_probes 5)

"${launch[@]}" -n 4 \
  isoshard doctor --attach --expect-world-size 4

"${launch[@]}" -n 4 \
  isoshard verify --attach --expect-world-size 4 --subjects autotp,fsdp_tp --tp 2 --dp 2 \
  --output-dir reports

"${launch[@]}" --map-by node -n 4 \
  isoshard verify --attach --expect-world-size 4 --subjects autotp,fsdp_tp --tp 2 --dp 2 \
  --output-dir reports_tp_across
