# SPDX-License-Identifier: Apache-2.0
"""transformers: tp_plan="auto" of each architecture that has a plan, its FSDP and its experts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist

from .. import models
from ..spec import Spec, mesh

PRELOAD = ("transformers", "transformers.models.auto.modeling_auto", "matrix.models")
#: Process groups of cases stay open in the ranks: after so many these are started anew.
CASES = 25
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
}

#: Architectures with a plan whose tiny config trains.
PLANS = (
    *("afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam"),
    *("cohere", "cohere2", "cohere2_moe", "cwm", "deepseek_v2", "deepseek_v3", "deepseek_v32"),
    *("deepseek_v4", "doge", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo"),
    *("flint", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite"),
    *("glm_moe_dsa", "gpt_neox", "gpt_oss", "granite", "granite_swa", "granitemoe"),
    *("granitemoe_swa", "granitemoehybrid", "granitemoeshared", "helium", "hrm_text"),
    *("hunyuan_v1_moe", "hy_v3", "hy_v4", "hyperclovax", "internlm3", "iquestcoder", "jais2"),
    *("jamba", "kolibri1", "laguna", "llama", "llama4_text", "longcat_flash", "mellum"),
    *("mimo_v2_flash", "minicpm3", "minimax", "minimax_m2", "minimax_m3_vl_text", "ministral"),
    *("ministral3", "mistral", "mixtral", "nanochat", "nemotron", "olmo", "olmo2", "olmo3"),
    *("olmo_hybrid", "olmoe", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("seed_oss", "smollm3", "solar_open", "starcoder2", "vaultgemma", "youtu"),
)
EXPERTS = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "deepseek_v3", "ernie4_5_moe"),
    *("minimax_m2", "granitemoe", "flex_olmo", "llama4_text", "jamba", "phimoe", "hunyuan_v1_moe"),
)


#: Architectures whose second step nothing can be said of: routing or signs flip by roundings.
ONE_STEP = ("deepseek_v4", "ernie4_5_moe", "nemotron")
COMMON = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "glm"),
    *("gpt_neox", "starcoder2", "cohere", "olmo2", "granite", "mixtral", "qwen2_moe", "gpt_oss"),
    *("smollm3", "exaone4", "ernie4_5", "helium", "nanochat", "seed_oss"),
)
#: Switches of configs, and the architectures that have them (where they change what is computed).
SWITCHES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "attention_bias": (
        True,
        (
            *("afmoe", "apertus", "arcee", "axk1", "axk2", "bailing_hybrid", "beam", "cohere"),
            *("cohere2", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "doge"),
            *("flex_olmo", "flint", "gemma", "gemma2", "gemma3_text", "glm4_moe", "glm4_moe_lite"),
            *("glm_moe_dsa", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "helium"),
            *("granitemoeshared", "hrm_text", "hunyuan_v1_moe", "hy_v3", "hy_v4", "hyperclovax"),
            *("internlm3", "iquestcoder", "laguna", "llama", "longcat_flash", "mellum"),
            *("minicpm3", "nanochat", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "phimoe"),
            *("qwen3", "qwen3_moe", "smollm3", "solar_open", "vaultgemma", "youtu"),
        ),
    ),
    "mlp_bias": (
        True,
        (
            *("arcee", "aria_text", "cwm", "deepseek_v2", "deepseek_v32", "doge", "glm_moe_dsa"),
            *("granite", "granite_swa", "helium", "hy_v3", "hyperclovax", "internlm3", "llama"),
            *("iquestcoder", "minicpm3", "seed_oss", "smollm3"),
        ),
    ),
    "use_qk_norm": (True, ("cohere", "glm4_moe")),
    "qk_layernorm": (True, ("phi",)),
    "attention_out_bias": (True, ("seed_oss",)),
    "qkv_bias": (False, ("qwen2_moe",)),
    "use_bias": (True, ("ernie4_5", "ernie4_5_moe")),
    "use_parallel_residual": (False, ("gpt_neox",)),
    "lm_head_bias": (True, ("phimoe",)),
    "norm_topk_prob": (False, ("qwen3_moe", "deepseek_v3", "glm4_moe", "mellum", "hy_v4")),
    "rope_interleave": (False, ("deepseek_v3", "youtu", "axk1", "glm4_moe_lite")),
    "moe_apply_router_weight_on_input": (True, ("laguna",)),
    "enable_moe_fp32_combine": (False, ("hy_v3",)),
    "mup_enabled": (True, ("afmoe",)),
    "is_moe": (True, ("doge",)),
    "mamba_proj_bias": (True, ("jamba",)),
    "linear_allow_neg_eigval": (False, ("olmo_hybrid",)),
    "gating": (False, ("laguna",)),
    "kda_safe_gate": (False, ("bailing_hybrid",)),
    "use_post_norm": (False, ("hyperclovax",)),
    "clip_qkv": (0.05, ("olmo", "olmoe", "flex_olmo")),
    "hidden_act": ("relu", ("llama", "mixtral", "phi3")),
    "partial_rotary_factor": (0.5, ("llama", "glm4_moe", "nemotron", "phi", "stablelm")),
    "num_nextn_predict_layers": (1, ("deepseek_v3", "glm4_moe", "minimax_m2")),
}


def specs() -> Iterator[Spec]:
    """Each plan on two ranks, tied and with odd sizes; some on four, and with FSDP."""
    new = partial(Spec, "hf_tp")
    four = (("num_key_value_heads", 4),)
    for name in PLANS:
        steps = 1 if name in ONE_STEP else 2
        yield new(name, mesh(tp=2), steps=steps, config=four)
    for switch, (value, names) in SWITCHES.items():
        for name in names:
            if name in PLANS:
                yield new(name, mesh(tp=2), config=(*four, (switch, value)))
    for name in COMMON:
        yield new(name, mesh(tp=2), tied=True, micro_batches=2, optimizer="momentum", seed=1)
        yield new(name, mesh(tp=2), sizes="odd", optimizer="sgd", seed=2)
        yield new(name, mesh(tp=4), config=four, seed=3)
    for name in ("llama", "gpt_neox", "phi3", "mixtral"):
        yield new(name, mesh(tp=4), seed=3)
    six = (("num_attention_heads", 6), ("num_key_value_heads", 3), ("hidden_size", 48))
    for name in ("llama", "qwen3", "gpt_neox", "phi3", "mixtral", "gemma2", "cohere", "gpt_oss"):
        yield new(name, mesh(tp=3), sizes="odd", seed=4, config=six)
    for name in ("qwen3_moe", "glm4", "deepseek_v3", "longcat_flash", "minicpm3", "flex_olmo"):
        yield new(name, mesh(tp=2), micro_batches=2, seed=1, config=four)
    for name in ("llama", "qwen3", "mixtral", "gpt_neox", "phi3"):
        yield new(name, mesh(tp=2), dtype="bf16", optimizer="sgd")
        yield new(name, mesh(tp=2), dtype="fp64")
        yield new(name, mesh(tp=2), clip=0.5)
    for name in (*COMMON, "hrm_text", "apertus", "deepseek_v3", "minimax", "olmo_hybrid", "jamba"):
        yield new(name, mesh(dp=2), "fsdp", tied=name in ("gemma", "qwen2"))
        yield new(name, mesh(dp=2, tp=2), "fsdp", config=four)
    for name in ("llama", "qwen3", "gemma2", "mixtral"):
        yield new(name, mesh(dp=3), "fsdp", sizes="odd", tied=True, steps=2)
        yield new(name, mesh(dp_replicate=2, dp_shard=2), "fsdp", steps=2, clip=0.5)
        yield new(name, mesh(dp=2), "fsdp", micro_batches=2, clip=0.5)
    for name in EXPERTS:
        yield new(name, mesh(ep=2), "experts", config=four)
        yield new(name, mesh(dp=2), "experts", config=four)
        yield new(name, mesh(dp=2, tp=2), "experts", config=four)


def parallelize(spec: Spec, model: Any, device_mesh: Any) -> Any:
    """The model as from_pretrained loads it for these ranks."""
    from transformers.distributed import DistributedConfig

    with shared_folder() as folder:
        if dist.get_rank() == 0:
            model.save_pretrained(folder)
        dist.barrier()
        loaded = type(model).from_pretrained(
            folder,
            dtype=spec.torch_dtype,
            attn_implementation="eager",
            distributed_config=DistributedConfig(**_sizes_of(spec)),
        )
        dist.barrier()
    return loaded.train()


def with_adapters(spec: Spec, model: Any, device_mesh: Any) -> Any:
    """The base of a PEFT model loaded for these ranks, with the same adapters on it."""
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    state = get_peft_model_state_dict(model)
    config = model.peft_config["default"]
    base = parallelize(replace(spec, variant="plain"), model.unload(), device_mesh)
    adapted = get_peft_model(base, config)
    set_peft_model_state_dict(adapted, state)
    return adapted.train()


def _sizes_of(spec: Spec) -> dict[str, Any]:
    """DistributedConfig's arguments for a mesh."""
    axes = spec.degrees
    tp = axes.get("tp", axes.get("ep", 1))
    sizes: dict[str, Any] = {"tp_plan": "auto"} if spec.variant == "plain" else {"tp_size": tp}
    if spec.variant != "plain":
        sizes["fsdp_size"] = axes.get("dp", axes.get("dp_shard", 1))
        sizes["dp_replicate_size"] = axes.get("dp_replicate", 1)
    if spec.variant == "experts":
        sizes["ep_size"] = spec.size
    return sizes


@contextmanager
def shared_folder() -> Iterator[str]:
    """A folder that rank 0 makes and removes again."""
    with tempfile.TemporaryDirectory() if dist.get_rank() == 0 else nullcontext("") as own:
        names = [own]
        dist.broadcast_object_list(names)
        yield names[0]


def arguments(spec: Spec) -> dict[str, Any]:
    """What isoshard.check gets."""
    return {
        "build": partial(models.build, spec),
        "parallelize": partial(parallelize, spec),
        "batch": models.batch_of(spec),
        "optimizer": partial(models.make_optimizer, spec),
    }
