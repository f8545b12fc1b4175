# SPDX-License-Identifier: Apache-2.0
# isoshard judge --mesh dp=2,tp=2 -- deepspeed --num_accelerators 4 deepspeed_autotp.py --tp 2
import argparse

import cpu_for_deepspeed  # noqa: F401  (a machine with GPUs needs none)
import deepspeed
import torch
from tiny import batches_of, model_of

parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=2)
parser.add_argument("--bf16", action="store_true")
options = parser.parse_known_args()[0]  # DeepSpeed's launcher adds --local_rank
deepspeed.init_distributed("gloo")
rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
tp = min(options.tp, world_size)
dp = world_size // tp
dtype = torch.bfloat16 if options.bf16 else torch.float32
model = deepspeed.tp_model_init(model_of("qwen2", dtype, vocab_size=252), tp_size=tp, dtype=dtype)
precision = {"bf16": {"enabled": options.bf16}, "zero_optimization": {"stage": +options.bf16}}
cut = {"tensor_parallel": {"autotp_size": tp}, "gradient_accumulation_steps": 2}
adam = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
settings = {"train_micro_batch_size_per_gpu": 4 // dp, **cut, **precision, **adam}
engine = deepspeed.initialize(model=model, config=settings)[0]
for batch in batches_of(steps=6):  # two micro-batches a step
    ids = batch.chunk(dp)[rank // tp]
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
