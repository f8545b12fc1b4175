# SPDX-License-Identifier: Apache-2.0
"""accelerate's loop and loaders, Trainer, and PEFT's adapters under DDP, FSDP2 and tp_plan."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from .. import models
from ..spec import Spec, mesh
from . import hf_tp, native

PRELOAD = (
    *("transformers", "transformers.models.auto.modeling_auto", "matrix.models", "accelerate"),
    *("peft", "transformers.trainer", "torch.distributed.fsdp"),
)
#: Process groups of cases stay open in the ranks: after so many these are started anew.
CASES = 40
ENVIRONMENT = {**hf_tp.ENVIRONMENT, "ACCELERATE_USE_CPU": "true"}
MODELS = ("qwen2", "llama", "gpt2", "gemma2", "mixtral", "opt", "bloom", "phi")
ADAPTERS = ("lora", "dora", "rslora", "bias", "saved", "ia3", "vera", "loha", "oft")


def specs() -> Iterator[Spec]:
    """Loops, loaders and adapters over models."""
    for i, name in enumerate(MODELS):
        new = partial(Spec, "accelerate", name, optimizer=("adamw", "momentum")[i % 2])
        yield new(mesh(dp=2), "loop", micro_batches=1 + i % 3, clip=0.2, steps=2)
        yield new(mesh(dp=2 + i % 2), "loader", micro_batches=1 + i % 2, tied=i % 2 == 0)
    for variant in ("split", "dispatch", "tokens", "fsdp2", "fsdp2_loader"):
        for data in (2, 3):
            new = partial(Spec, "accelerate", "qwen2", mesh(dp=data), variant)
            yield new(micro_batches=2, clip=0.2)
            yield new(seed=1, steps=2 if "fsdp2" in variant else 1)
    for i, name in enumerate(MODELS):
        yield Spec("trainer", name, mesh(dp=2), "plain", micro_batches=1 + i % 3, clip=0.2)
    for data in (2, 3):
        for micro in (1, 2):
            for variant in ("tokens", "group_split", "no_sync_each"):
                new = partial(Spec, "trainer", "qwen2", mesh(dp=data), variant)
                yield new(micro_batches=micro, clip=0.2, optimizer="momentum")
    for adapter in ADAPTERS:
        for name, wrap in (("llama", "ddp"), ("qwen2", "fsdp2"), ("llama", "tp"), ("gpt2", "ddp")):
            new = partial(Spec, "peft", name, variant=f"{adapter}_{wrap}", steps=2)
            if not (name == "gpt2" and adapter not in ("lora", "dora", "bias")):
                four = (("num_key_value_heads", 4),) if wrap == "tp" else ()
                yield new(mesh=mesh(tp=2) if wrap == "tp" else mesh(dp=2), config=four)


def build(spec: Spec) -> torch.nn.Module:
    """The tiny model, with adapters where the case has some (for tp they come later)."""
    model = models.build(spec)
    return _adapted(spec, model) if spec.framework == "peft" else model


def _adapted(spec: Spec, model: torch.nn.Module) -> torch.nn.Module:
    import peft

    kind = spec.variant.partition("_")[0]
    targets = ["c_attn", "c_fc"] if spec.architecture == "gpt2" else ["q_proj", "o_proj", "up_proj"]
    common: dict[str, Any] = {"target_modules": targets}
    lora = {**common, "r": 4, "lora_alpha": 8, "lora_dropout": 0.0}
    lora |= {"fan_in_fan_out": True} if spec.architecture == "gpt2" else {}
    configs: dict[str, Any] = {
        "lora": lambda: peft.LoraConfig(**lora),
        "dora": lambda: peft.LoraConfig(**lora, use_dora=True),
        "rslora": lambda: peft.LoraConfig(**lora, use_rslora=True),
        "bias": lambda: peft.LoraConfig(**lora, bias="all"),
        "saved": lambda: peft.LoraConfig(**lora, modules_to_save=["lm_head"]),
        "ia3": lambda: peft.IA3Config(**common, feedforward_modules=["up_proj"]),
        "vera": lambda: peft.VeraConfig(target_modules=["q_proj"], r=8),
        "loha": lambda: peft.LoHaConfig(**common, r=4),
        "oft": lambda: peft.OFTConfig(**common, oft_block_size=4, r=0),
    }
    adapted: torch.nn.Module = peft.get_peft_model(model, configs[kind]())
    trained = torch.nn.ParameterList(p for p in adapted.parameters() if p.requires_grad)
    models.stir(trained, spec.seed + 7)
    return adapted


def parallelize(spec: Spec, model: Any, device_mesh: Any) -> Any:
    """The wrapped model, with its optimizer where accelerate prepares both."""
    if spec.framework == "trainer":
        return model
    if spec.framework == "accelerate":
        return _prepared(spec, model)
    wrap = spec.variant.rpartition("_")[2]
    if wrap == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if wrap == "fsdp2":
        return native.shard(spec, model, device_mesh)
    return hf_tp.with_adapters(spec, model, device_mesh)


def _reset() -> None:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()


def _prepared(spec: Spec, model: Any) -> Any:
    from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin

    _reset()
    options: dict[str, Any] = {}
    if "fsdp2" in spec.variant:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True
        )
    loader = DataLoaderConfiguration(
        split_batches=spec.variant == "split", dispatch_batches=spec.variant == "dispatch" or None
    )
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=spec.micro_batches,
        dataloader_config=loader,
        **options,
    )
    optimizer = models.make_optimizer(spec, model.parameters())
    data = None
    if spec.variant in ("loader", "split", "dispatch", "fsdp2_loader"):
        batch = models.batch_of(spec)
        rows = [{k: v[i] for k, v in batch.items()} for i in range(len(batch["input_ids"]))]
        size = 2 * spec.data_degree if spec.variant == "split" else 2
        data = torch.utils.data.DataLoader(rows, batch_size=size)  # type: ignore[arg-type]
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    model.matrix = {"accelerator": accelerator, "optimizer": optimizer, "data": data}
    return model, optimizer.optimizer


def step(spec: Spec, model: Any, optimizer: Any, parts: list[Any]) -> None:
    """A step as the library's documentation has it."""
    if spec.framework == "trainer":
        _train(spec, model, optimizer)
        return
    accelerator, wrapped = model.matrix["accelerator"], model.matrix["optimizer"]
    for part in model.matrix["data"] or parts:
        with accelerator.accumulate(model):
            output = model(**part)
            loss = output.loss if spec.variant != "tokens" else token_loss(spec, output, part)
            accelerator.backward(loss)
            if accelerator.sync_gradients and spec.clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), spec.clip)
            wrapped.step()
            wrapped.zero_grad()


def _train(spec: Spec, model: Any, optimizer: Any) -> None:
    import transformers

    _reset()
    is_split = spec.variant == "group_split"  # then a batch is that of all ranks
    batch = models.batch_of(spec)
    labels = _uneven(batch["labels"]) if spec.variant == "tokens" else batch["labels"]
    rows = [{"input_ids": i, "labels": j} for i, j in zip(batch["input_ids"], labels, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=2 * (spec.data_degree if is_split else 1),
            gradient_accumulation_steps=spec.micro_batches,
            max_steps=1,
            max_grad_norm=spec.clip or 0.0,
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            accelerator_config={
                "split_batches": is_split,
                "gradient_accumulation_kwargs": {"sync_each_batch": spec.variant == "no_sync_each"},
            },
            ddp_find_unused_parameters=False,
        )
        trainer = transformers.Trainer(
            model, settings, train_dataset=rows, optimizers=(optimizer, None)
        )
        trainer.train()


def _uneven(ids: torch.Tensor) -> torch.Tensor:
    """Labels of which each sample counts another number."""
    places = torch.arange(ids.shape[1])[None]
    return ids.masked_fill(places > 2 + torch.arange(len(ids))[:, None] % 5, -100)


def token_loss(spec: Spec, output: Any, part: Any) -> torch.Tensor:
    """A summand of the mean over the tokens of all ranks and micro-batches."""
    total = int((_uneven(models.ids_of(spec))[:, 1:] != -100).sum())
    logits, targets = output.logits[:, :-1].flatten(0, 1).float(), part["labels"][:, 1:].flatten()
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    count = spec.data_degree * spec.micro_batches * 2 / len(part["labels"])
    return torch.as_tensor(losses / total * count)


def arguments(spec: Spec) -> dict[str, Any]:
    """What isoshard.check gets."""
    batch = models.batch_of(spec)
    found = {
        "build": partial(build, spec),
        "parallelize": partial(parallelize, spec),
        "optimizer": partial(models.make_optimizer, spec),
        "batch": batch,
    }
    if spec.variant == "tokens":
        batch["labels"] = _uneven(batch["labels"])
        found["loss"] = partial(token_loss, spec)
    if spec.framework != "peft":
        found["step"] = partial(step, spec)
    return found
