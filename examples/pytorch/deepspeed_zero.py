# SPDX-License-Identifier: Apache-2.0
# isoshard judge -- deepspeed --num_accelerators 2 deepspeed_zero.py --zero 3
import argparse

import cpu_for_deepspeed  # noqa: F401  (a machine with GPUs needs none)
import deepspeed
import torch
from tiny import batches_of, model_of

parser = argparse.ArgumentParser()
parser.add_argument("--zero", type=int, default=3)
options = parser.parse_known_args()[0]  # DeepSpeed's launcher adds --local_rank
deepspeed.init_distributed("gloo")
rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
settings = {
    "train_micro_batch_size_per_gpu": 4 // world_size,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": options.zero, "stage3_param_persistence_threshold": 1000},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
model = model_of("qwen2")
engine = deepspeed.initialize(model=model, config=settings)[0]
for batch in batches_of(steps=6):  # two micro-batches a step
    ids = batch.chunk(world_size)[rank]
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
