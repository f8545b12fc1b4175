# SPDX-License-Identifier: Apache-2.0
"""transformers: tp_plan="auto" of each architecture that has a plan, its FSDP and its experts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist



from .. import models
from ..spec import Spec, mesh

PRELOAD = ("transformers", "transformers.models.auto.modeling_auto", "matrix.models")
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


def specs() -> Iterator[Spec]:
    """Each plan on two ranks, tied and with odd sizes; some on four, and with FSDP."""
    new = partial(Spec, "hf_tp")
    for name in PLANS:
        yield new(name, mesh(tp=2), steps=2, config=(("num_key_value_heads", 4),))


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
            distributed_config=DistributedConfig(tp_plan="auto"),
        )
        dist.barrier()
    return loaded.train()


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
