# SPDX-License-Identifier: Apache-2.0
# python torch_1f1b_order.py
"""torch 2.11.0: the table of Schedule1F1B names micro-batches that there are not."""

from types import SimpleNamespace

from torch.distributed.pipelining.schedules import Schedule1F1B

for stages, micro_batches in ((2, 4), (4, 8)):
    shape = SimpleNamespace(_num_stages=stages, _n_microbatches=micro_batches)
    table = Schedule1F1B._get_pipeline_order(shape)
    for rank in (0, stages - 1):
        passes = [a for a in table[rank] if a and a.computation_type.name == "FORWARD"]
        forward = [a.microbatch_index for a in passes]
        print(f"pp {stages}, {micro_batches} micro-batches, rank {rank}: forward of {forward}")
