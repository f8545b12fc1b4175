# SPDX-License-Identifier: Apache-2.0
# isoshard judge --mesh dp=2,tp=2 -- deepspeed --num_accelerators 4 deepspeed_autotp.py --tp 2
import argparse
import os

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["LOCAL_SIZE"] = os.environ["WORLD_SIZE"]
import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=2)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--local_rank", type=int)
options = parser.parse_args()
torch.manual_seed(0)
dtype = torch.bfloat16 if options.bf16 else torch.float32
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 252}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
config = AutoConfig.for_model("qwen2", **sizes, **heads, use_cache=False)
model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
deepspeed.init_distributed("gloo")
rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
tp = min(options.tp, world_size)
dp = world_size // tp
model = deepspeed.tp_model_init(model, tp_size=tp, dtype=dtype)
settings = {
    "train_micro_batch_size_per_gpu": 4 // dp,
    "gradient_accumulation_steps": 2,
    "tensor_parallel": {"autotp_size": tp},
    "zero_optimization": {"stage": 1 if options.bf16 else 0},
    "bf16": {"enabled": options.bf16},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
engine = deepspeed.initialize(model=model, config=settings)[0]
for batch in torch.randint(0, 251, (6, 4, 32), generator=torch.Generator().manual_seed(5)):
    ids = batch.chunk(dp)[rank // tp]
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
