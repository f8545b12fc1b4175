# SPDX-License-Identifier: Apache-2.0
"""torchrun --nproc-per-node 2 train_architecture.py NAME: a tiny model of transformers, cut in two.

One process trains the model as it is built.
"""

import os
import sys
from pathlib import Path

import torch.distributed as dist
import transformers.models.auto.modeling_auto  # noqa: F401  (before ranks are forked)

sys.path.insert(0, str(Path(__file__).parents[1]))
from matrix import models
from matrix.families import hf_tp
from precision.architectures import spec_of

os.environ.update(hf_tp.ENVIRONMENT)
spec = spec_of(sys.argv[1])
model = models.build(spec)
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    dist.init_process_group("gloo")
    model = hf_tp.parallelize(spec, model, None)
optimizer = models.make_optimizer(spec, model.parameters())
batch = models.batch_of(spec)
for _ in range(3):
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
