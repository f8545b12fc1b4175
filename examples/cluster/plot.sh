#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# After the three jobs: the curves in one figure, and each beside that of ddp.
set -euo pipefail
curves=${1:-/mnt/cluster_storage/loss_curves}

isoshard plot --input-dir "$curves" --output "$curves/loss_curves.svg"
