# SPDX-License-Identifier: Apache-2.0
# isoshard judge -- accelerate launch --multi_gpu --num_processes 2 accelerate_loop.py
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 251}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
config = AutoConfig.for_model("llama", **sizes, **heads, use_cache=False)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
samples = torch.randint(0, 251, (48, 32), generator=torch.Generator().manual_seed(5))
loader = DataLoader(samples, batch_size=4 // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for ids in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
