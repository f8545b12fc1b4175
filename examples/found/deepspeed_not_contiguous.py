# SPDX-License-Identifier: Apache-2.0
# torchrun --standalone --nproc-per-node 2 deepspeed_not_contiguous.py
"""DeepSpeed 0.19.8, AutoTP: the sum over ranks of a tensor that is not contiguous is lost."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["LOCAL_SIZE"] = os.environ["WORLD_SIZE"]
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import ColumnParallel, RowParallel

deepspeed.init_distributed("gloo")
group, rank = dist.group.WORLD, dist.get_rank()
for name, change in (("contiguous", lambda t: t), ("transposed", lambda t: t.t().contiguous().t())):
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    ColumnParallel.apply(group, x).backward(change(torch.ones(2, 3)))
    out = RowParallel.apply(group, change(torch.ones(2, 3)), False)
    if rank == 0:
        print(f"{name}: input gradient of a column-parallel layer {x.grad[0, 0]:g}, output of a "
              f"row-parallel layer {out[0, 0]:g}; right is 2 and 2")  # fmt: skip
dist.barrier()
os._exit(0)
