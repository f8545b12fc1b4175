#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# One side of a matched comparison (docs/reference/bench.md): the other one is the script beside
# this one. Both take the same variables, with the same defaults:
#   DP_SIZE=2 TP_SIZE=4 MODEL_NAME=small tools/bench/run_autotp.sh [more flags]
set -eu
tree=$(cd "$(dirname "$0")/../.." && pwd)
exec "${ISOSHARD:-$tree/isoshard}" bench \
    --impl autotp \
    --model_name "${MODEL_NAME:-Qwen/Qwen3-32B}" \
    --num_layers "${NUM_LAYERS:-0}" \
    --dp_size "${DP_SIZE:-1}" \
    --tp_size "${TP_SIZE:-auto}" \
    --batch_size "${BATCH_SIZE:-1}" \
    --seq_length "${SEQ_LENGTH:-2048}" \
    --num_training_steps "${NUM_TRAINING_STEPS:-100}" \
    --warmup_steps "${WARMUP_STEPS:-5}" \
    --dtype "${DTYPE:-bfloat16}" \
    --output_dir "${OUTPUT_DIR:-./results}" \
    "$@"
