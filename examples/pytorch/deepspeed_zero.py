# SPDX-License-Identifier: Apache-2.0
# isoshard judge -- deepspeed --num_accelerators 2 deepspeed_zero.py --zero 3
import argparse
import os

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["LOCAL_SIZE"] = os.environ["WORLD_SIZE"]  # DeepSpeed's launcher on a CPU sets it, too
import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--zero", type=int, default=3)
parser.add_argument("--local_rank", type=int)
options = parser.parse_args()
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 251}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
config = AutoConfig.for_model("qwen2", **sizes, **heads, use_cache=False)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
deepspeed.init_distributed("gloo")
rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
settings = {
    "train_micro_batch_size_per_gpu": 4 // world_size,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": options.zero, "stage3_param_persistence_threshold": 1000},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
engine = deepspeed.initialize(model=model, config=settings)[0]
for batch in torch.randint(0, 251, (6, 4, 32), generator=torch.Generator().manual_seed(5)):
    ids = batch.chunk(world_size)[rank]
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
