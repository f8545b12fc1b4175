# SPDX-License-Identifier: Apache-2.0
"""Tiny models of transformers' architectures, and batches for them."""

from __future__ import annotations

import math
from typing import Any

import torch

from .spec import Spec

#: Settings of all architectures; each takes those that its config has.
_SETTINGS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
    "sliding_window": 4,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 64,
    "n_inner": 48,
    "ffn_dim": 48,
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 4,
    "max_seq_len": 64,
    "expansion_ratio": 2,
    "word_embed_proj_dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_dim": 48,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
_DROPOUTS = (
    *("attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop", "dropout"),
    *("activation_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"),
    *("embedding_dropout", "residual_dropout", "router_jitter_noise", "input_jitter_noise"),
    "layerdrop",
)
_MLA = {"head_dim": 4, "num_key_value_heads": 4}
_OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            *("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"),
            *("glm_moe_dsa", "longcat_flash", "minicpm3", "youtu"),
        ),
        _MLA,
    ),
    "falcon": {"head_dim": None},
    "gptj": {"rotary_dim": 4, "head_dim": None},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2},
    "codegen": {"rotary_dim": 4, "head_dim": None},
}
#: Sizes that no degree divides.
_ODD = {"vocab_size": 97, "intermediate_size": 50, "n_inner": 50, "moe_intermediate_size": 25}
#: Which config names mean a head of keys and values.
_KV = ("num_key_value_heads", "num_kv_heads")


def config_of(spec: Spec) -> Any:
    """The config of a tiny model."""
    from transformers import AutoConfig

    base = AutoConfig.for_model(spec.architecture)
    given = dict(_SETTINGS) | dict.fromkeys(_DROPOUTS, 0.0)
    given |= _ODD if "odd" in spec.sizes else {}
    given |= {"tie_word_embeddings": spec.tied}
    given |= _OWN.get(spec.architecture, {})
    known = {k: v for k, v in given.items() if _has(base, k) and v is not None}
    known |= {k: v for k, v in spec.config if not k.startswith("_")}
    return AutoConfig.for_model(spec.architecture, **known)


def _has(config: Any, key: str) -> bool:
    try:
        return hasattr(config, key) or key in type(config).attribute_map
    except Exception:  # an attribute that is different in each layer
        return False


def build(spec: Spec) -> torch.nn.Module:
    """The model, with weights that are nowhere 0 or 1."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(spec.seed)
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(
        config_of(spec), dtype=spec.torch_dtype, attn_implementation="eager"
    )
    stir(model, spec.seed)
    return model.train()


def stir(model: torch.nn.Module, seed: int, size: float = 0.05) -> None:
    """Moves all weights a little. A bias of 0 that is added twice would change nothing."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator) * size
                parameter.add_(noise.to(parameter.dtype))


def ids_of(spec: Spec, *, per_part: int = 2, length: int = 8, vocabulary: int = 96) -> torch.Tensor:
    """[samples, length] token ids, as many samples as ranks and micro-batches need."""
    samples = spec.data_degree * spec.micro_batches * per_part
    generator = torch.Generator().manual_seed(spec.seed + 5)
    return torch.randint(3, vocabulary, (samples, length), generator=generator)


def batch_of(spec: Spec, **sizes: int) -> dict[str, torch.Tensor]:
    """Ids, which are their own labels."""
    ids = ids_of(spec, **sizes)
    return {"input_ids": ids, "labels": ids.clone()}


class Mlp(torch.nn.Module):
    """Embedding, blocks of norm, up, activation and down, norm, head; the logits."""

    def __init__(self, vocabulary: int = 48, hidden: int = 16, inner: int = 24) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, hidden)
        self.layers = torch.nn.ModuleList(Block(hidden, inner) for _ in range(2))
        self.norm = torch.nn.LayerNorm(hidden)
        self.head = torch.nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[B, S] -> [B, S, vocabulary]."""
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return torch.as_tensor(self.head(self.norm(hidden)))


class Block(torch.nn.Module):
    """A residual block: norm, attention over all earlier positions, norm, up and down."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)
        self.q = torch.nn.Linear(hidden, hidden)
        self.k = torch.nn.Linear(hidden, hidden, bias=False)  # softmax ignores such a bias
        self.v, self.o = torch.nn.Linear(hidden, hidden), torch.nn.Linear(hidden, hidden)
        self.up, self.down = torch.nn.Linear(hidden, inner), torch.nn.Linear(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, hidden] -> the same."""
        y = self.norm1(x)
        q, k, v = (p(y).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(4)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed = torch.softmax(scores.masked_fill(later, -1e9), -1) @ v
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))
        return out


def cross_entropy(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The mean loss of each position's next id."""
    flat = logits[:, :-1].flatten(0, 1).float()
    return torch.nn.functional.cross_entropy(flat, ids[:, 1:].flatten())


def build_mlp(spec: Spec, inner: int = 24) -> torch.nn.Module:
    """Mlp with moved weights; `odd` vocabularies divide by no degree."""
    model = Mlp(49 if "odd" in spec.sizes else 48, 16, inner)
    if spec.tied:
        model.head.weight = model.embed.weight
    model = model.to(spec.torch_dtype)
    stir(model, spec.seed)
    return model


def make_optimizer(spec: Spec, parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of a plain training."""
    trained = [p for p in parameters if p.requires_grad]
    if spec.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=0.05)
    if spec.optimizer == "momentum":
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.01)
