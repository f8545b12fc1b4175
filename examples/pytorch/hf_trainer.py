# SPDX-License-Identifier: Apache-2.0
# isoshard judge -- torchrun --nproc-per-node 2 hf_trainer.py
import os

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 251}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
config = AutoConfig.for_model("qwen2", **sizes, **heads, tie_word_embeddings=True, use_cache=False)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")


def sample(i):
    ids = torch.randint(0, 251, (32,), generator=torch.Generator().manual_seed(i))
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
