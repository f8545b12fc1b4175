# SPDX-License-Identifier: Apache-2.0
# isoshard judge -- torchrun --nproc-per-node 2 hf_trainer.py
import os

import torch
from tiny import LENGTH, VOCABULARY, model_of
from transformers import Trainer, TrainingArguments

model = model_of("qwen2", tie_word_embeddings=True)


def sample(i):
    ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(i))
    return {"input_ids": ids, "labels": ids}


arguments = TrainingArguments(
    "trainer_output",
    per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
    max_steps=3,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    report_to=[],
    save_strategy="no",
    use_cpu=True,
    disable_tqdm=True,
)
Trainer(model=model, args=arguments, train_dataset=[sample(i) for i in range(32)]).train()
