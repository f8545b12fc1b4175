# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: ZeRO 0 to 3 and AutoTP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from .. import models
from ..spec import Spec, mesh

PRELOAD = ("transformers", "transformers.models.auto.modeling_auto", "deepspeed", "matrix.models")
#: Process groups of cases stay open in the ranks: after so many these are started anew.
CASES = 25
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
}
#: A norm that nothing is clipped to, so that norms are compared, too.
_NEVER = 1e6
STAGES = (0, 1, 2, 3)
ZERO_MODELS = ("qwen2", "gpt2", "llama", "bloom", "gemma", "mixtral", "opt", "falcon")
TP_MODELS = (
    *("llama", "qwen2", "qwen3", "mistral", "gpt2", "gemma", "gemma2", "falcon", "phi", "phi3"),
    *("gpt_neox", "opt", "bloom", "mixtral", "qwen2_moe", "starcoder2", "olmo2", "cohere"),
    *("stablelm", "granite", "glm", "gptj", "codegen", "gpt_bigcode", "xglm", "mpt", "persimmon"),
    *("glm4", "helium", "smollm3", "exaone4", "olmo", "nemotron", "deepseek_v2", "internlm3"),
    *("gpt_oss", "apertus", "arcee", "seed_oss", "ernie4_5", "biogpt"),
)


def specs() -> Iterator[Spec]:
    """Stages over micro-batches, clipping, tied and odd models; AutoTP over architectures."""
    for stage in STAGES:
        new = partial(Spec, "zero", variant=f"stage{stage}")
        for i, name in enumerate(("mlp", *ZERO_MODELS)):
            yield new(name, mesh(dp=2 + i % 2), steps=2, tied=i % 2 == 1, micro_batches=1 + i % 3)
        for optimizer in ("adamw", "sgd", "momentum"):
            yield new("mlp", mesh(dp=2), micro_batches=2, optimizer=optimizer, clip=0.1, steps=2)
            yield new("mlp", mesh(dp=3), micro_batches=3, optimizer=optimizer, sizes="odd", seed=1)
        yield new("mlp", mesh(dp=2), dtype="bf16", steps=2)
        yield new("qwen2", mesh(dp=2), dtype="bf16", micro_batches=2, clip=0.1, tied=True)
        yield new("mlp", mesh(dp=2), micro_batches=2, config=(("_frozen", True),))
        yield new("mlp", mesh(dp=2), micro_batches=2, config=(("_tokens", True),))
        yield new("mlp", mesh(dp=4), micro_batches=1, sizes="odd", steps=3, clip=0.1)
    for stage in (1, 2, 3):
        new = partial(Spec, "zero", "mlp", variant=f"stage{stage}", micro_batches=2, steps=2)
        for key, value in (
            ("overlap_comm", True),
            ("contiguous_gradients", False),
            ("reduce_scatter", False),
            ("reduce_bucket_size", 100),
            ("round_robin_gradients", True),
        ):
            yield new(mesh=mesh(dp=2), config=((key, value),), clip=0.1)
        yield new(mesh=mesh(dp=2), config=(("_prescale", True),))
    for key, value in (
        ("stage3_param_persistence_threshold", 0),
        ("stage3_max_live_parameters", 1),
        ("stage3_prefetch_bucket_size", 0),
        ("sub_group_size", 100),
        ("stage3_module_granularity_threshold", 10),
    ):
        yield Spec("zero", "qwen2", mesh(dp=2), "stage3", tied=True, config=((key, value),))
    for name in TP_MODELS:
        four = (("num_key_value_heads", 4),)
        steps = 1 if name == "nemotron" else 2  # its second step nothing can be said of
        yield Spec("autotp", name, mesh(tp=2), "stage0", steps=steps, config=four)
    for name in ("llama", "qwen2", "gpt2", "bloom", "falcon", "phi3", "mixtral", "opt"):
        yield Spec("autotp", name, mesh(tp=2), "stage0", tied=True, micro_batches=2, seed=1)
        yield Spec("autotp", name, mesh(tp=2), "stage0", sizes="odd", clip=0.1, seed=2)
        yield Spec("autotp", name, mesh(dp=2, tp=2), "stage1", clip=0.1, micro_batches=2, seed=3)
        yield Spec("autotp", name, mesh(dp=2, tp=2), "stage2", seed=4)
    for name in ("llama", "qwen2"):
        yield Spec("autotp", name, mesh(tp=4), "stage0", seed=5)
        yield Spec("autotp", name, mesh(tp=2), "stage1", dtype="bf16", clip=0.1)
        yield Spec("autotp", name, mesh(tp=2), "stage0", config=(("attention_bias", True),))


def build(spec: Spec) -> torch.nn.Module:
    """The tiny model; some with frozen weights."""
    is_mlp = spec.architecture == "mlp"
    model: torch.nn.Module = _WithLoss(spec) if is_mlp else models.build(spec)
    if _private(spec, "_frozen"):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name or "up" in name)
    return model


class _WithLoss(torch.nn.Module):
    """Mlp that returns its loss, as engines want it."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.inner = models.build_mlp(spec)
        self.is_by_token = _private(spec, "_tokens")
        self.parts = spec.data_degree * spec.micro_batches

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[B, S] -> the mean loss, or a share of that over all ranks' tokens."""
        logits = self.inner(input_ids)
        if not self.is_by_token:
            return models.cross_entropy(logits, input_ids)
        targets = input_ids[:, 1:].clone()
        targets[targets % 5 == 0] = -100
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum"
        )
        return losses / 100.0 * (self.parts * 2 / len(input_ids))


def _private(spec: Spec, key: str) -> bool:
    return bool(dict(spec.config).get(key, False))


def parallelize(spec: Spec, model: Any, device_mesh: Any) -> Any:
    """(engine, None)"""
    import deepspeed

    size = device_mesh.size()
    os.environ["LOCAL_SIZE"] = str(size)
    deepspeed.init_distributed("gloo")
    tp = spec.degrees.get("tp", 1) if size > 1 else 1
    stage = int(spec.variant[-1])
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 100}
    zero |= {k: v for k, v in spec.config if spec.framework == "zero" and not k.startswith("_")}
    kinds = {"adamw": ("AdamW", {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True})}
    kinds |= {"sgd": ("SGD", {"lr": 0.05}), "momentum": ("SGD", {"lr": 0.05, "momentum": 0.9})}
    kind, options = kinds[spec.optimizer]
    settings = {
        "train_micro_batch_size_per_gpu": 2 * spec.data_degree if size == 1 else 2,
        "gradient_accumulation_steps": spec.micro_batches,
        "gradient_clipping": spec.clip or _NEVER,
        "zero_optimization": zero,
        "bf16": {"enabled": spec.dtype == "bf16"},
        "optimizer": {"type": kind, "params": options},
        "prescale_gradients": _private(spec, "_prescale"),
        "zero_allow_untested_optimizer": True,
    }
    if spec.framework == "autotp" and tp > 1:
        model = deepspeed.tp_model_init(model, tp_size=tp, dtype=spec.torch_dtype)
        settings["tensor_parallel"] = {"autotp_size": tp}
    return deepspeed.initialize(model=model, config=settings)[0], None


def step(spec: Spec, model: Any, optimizer: Any, parts: list[Any]) -> None:
    """As DeepSpeed's documentation has it: backward and step for each micro-batch."""
    for part in parts:
        output = model(**part) if isinstance(part, dict) else model(part)
        model.backward(getattr(output, "loss", output))
        model.step()


def arguments(spec: Spec) -> dict[str, Any]:
    """What isoshard.check gets."""
    is_mlp = spec.architecture == "mlp"
    return {
        "build": partial(build, spec),
        "parallelize": partial(parallelize, spec),
        "batch": models.ids_of(spec, vocabulary=48) if is_mlp else models.batch_of(spec),
        "optimizer": partial(models.make_optimizer, spec),
        "step": partial(step, spec),
        "parallel_reference": spec.dtype == "bf16",
        "not_recorded": _not_recorded(spec),
        "max_grad_norm": spec.clip or _NEVER,
    }


def _not_recorded(spec: Spec) -> dict[str, str]:
    left_out = {"optimizer/*.step": "an engine counts its steps for all parameters"}
    if spec.variant == "stage0" and spec.dtype == "fp32":
        left_out["scalar/grad_norm"] = "an engine in fp32 without ZeRO keeps no norm"
    return left_out
