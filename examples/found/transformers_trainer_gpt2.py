# SPDX-License-Identifier: Apache-2.0
# python transformers_trainer_gpt2.py
"""transformers 5.23.0, Trainer: the loss of gpt2 is divided by tokens that it does not count."""

import tempfile

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 96}
ids = torch.randint(3, 96, (4, 8), generator=torch.Generator().manual_seed(1))
rows = [{"input_ids": row, "labels": row} for row in ids]
for name in ("llama", "opt", "gpt2"):
    torch.manual_seed(0)
    more = {"word_embed_proj_dim": 32, "ffn_dim": 48} if name == "opt" else {}
    config = AutoConfig.for_model(name, **sizes, **more, bos_token_id=1, eos_token_id=2)
    for key in ("dropout", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, key, 0.0)
    model = AutoModelForCausalLM.from_config(config).train()
    right = model(input_ids=ids, labels=ids).loss.item()
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, per_device_train_batch_size=4, max_steps=1, use_cpu=True, report_to=[],
            save_strategy="no", disable_tqdm=True, max_grad_norm=0.0,
        )  # fmt: skip
        trainer = Trainer(model, settings, train_dataset=rows)
        loss = trainer.train().training_loss
    print(f"{name}: Trainer's loss {loss:.4f}, right is {right:.4f}, factor {loss / right:.4f}")
