# SPDX-License-Identifier: Apache-2.0
"""What several examples train: a tiny model of transformers on random ids."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
LENGTH, VOCABULARY = 32, 251


def model_of(architecture, dtype=torch.float32, **changes):
    """A causal language model, the same on all ranks."""
    torch.manual_seed(0)
    settings = {**SIZES, **HEADS, "vocab_size": VOCABULARY, "use_cache": False, **changes}
    config = AutoConfig.for_model(architecture, **settings)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")


def batches_of(steps, samples=4):
    """The ids of each step's whole batch, the same on all ranks."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(1, VOCABULARY, (steps, samples, LENGTH), generator=generator)
