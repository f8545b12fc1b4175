# SPDX-License-Identifier: Apache-2.0
# isoshard judge --mesh tp=2 -- torchrun --nproc-per-node 2 hf_tp_plan.py --model qwen2
import sys
import tempfile

import torch
from transformers import AutoConfig, AutoModelForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 252}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
config = AutoConfig.for_model(sys.argv[2], **sizes, **heads, pad_token_id=0, use_cache=False)
with tempfile.TemporaryDirectory() as folder:  # in place of a checkpoint from the hub
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, tp_plan="auto", dtype=torch.float32, attn_implementation="eager"
    )
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for ids in torch.randint(1, 252, (3, 4, 32), generator=torch.Generator().manual_seed(5)):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
