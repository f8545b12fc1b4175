# SPDX-License-Identifier: Apache-2.0
# isoshard judge -- accelerate launch --multi_gpu --num_processes 2 accelerate_loop.py
import torch
from accelerate import Accelerator
from tiny import batches_of, model_of
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = model_of("llama")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(batches_of(steps=12).flatten(0, 1), batch_size=4 // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for ids in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
