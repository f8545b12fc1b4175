# SPDX-License-Identifier: Apache-2.0
# isoshard judge --mesh tp=2 -- torchrun --nproc-per-node 2 hf_tp_plan.py --model qwen2
import sys
import tempfile

import torch
from tiny import batches_of, model_of
from transformers import AutoModelForCausalLM

with tempfile.TemporaryDirectory() as folder:  # in place of a checkpoint from the hub
    model_of(sys.argv[2], vocab_size=252, pad_token_id=0).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, tp_plan="auto", dtype=torch.float32, attn_implementation="eager"
    )
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for ids in batches_of(steps=3):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
