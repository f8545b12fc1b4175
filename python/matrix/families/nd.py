# SPDX-License-Identifier: Apache-2.0
"""Pipelines of torch.distributed.pipelining and torch's context_parallel."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from .. import models
from ..spec import Spec, mesh

sys.path.append(str(Path(__file__).parents[3] / "examples" / "pytorch"))  # ring_on_cpu

PRELOAD = ("torch.distributed.pipelining", "torch.distributed.tensor.experimental", "matrix.models")
CASES = 100
ENVIRONMENT: dict[str, str] = {}

SINGLE = ("GPipe", "1F1B")
MULTI = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
#: context_parallel's two orders of tokens, and its two ways of bringing keys.
ORDERS = ("balanced", "in_order", "balanced_rotated", "in_order_rotated")
LAYERS, MICRO_BATCHES = 4, 4


def specs() -> Iterator[Spec]:
    """Every schedule and order alone, with data parallelism, and with odd sizes."""
    for name in SINGLE + MULTI:
        new = partial(Spec, "pp", "mlp", variant=name)
        yield new(mesh=mesh(pp=2), steps=2)
        yield new(mesh=mesh(pp=2), sizes="odd", optimizer="momentum", clip=0.1, seed=1)
        yield new(mesh=mesh(pp=2), dtype="fp64", optimizer="sgd", seed=2)
        yield new(mesh=mesh(dp=2, pp=2), steps=2, seed=3)
    for name in ORDERS:
        new = partial(Spec, "cp", "mlp", variant=name)
        yield new(mesh=mesh(cp=2), steps=2)
        yield new(mesh=mesh(cp=2), sizes="odd", optimizer="momentum", clip=0.1, seed=1)
        yield new(mesh=mesh(dp=2, cp=2), micro_batches=2, steps=2, seed=2)
        yield new(mesh=mesh(cp=4), optimizer="sgd", seed=3)


class Layer(models.Block):
    """The block with the attention that context_parallel replaces."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, hidden] -> the same."""
        y = self.norm1(x)
        q, k, v = (p(y).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return out


class Part(torch.nn.Module):
    """Some layers of the model, under their names in it."""

    def __init__(self, whole: Any, layers: range) -> None:
        super().__init__()
        self.embed = whole.embed if layers.start == 0 else None
        self.layers = torch.nn.ModuleDict({str(i): whole.layers[i] for i in layers})
        is_last = layers.stop == LAYERS
        self.norm, self.head = (whole.norm, whole.head) if is_last else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Ids or hidden states in, hidden states or logits out."""
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def build(spec: Spec) -> torch.nn.Module:
    """Four blocks with moved weights."""
    torch.manual_seed(spec.seed)
    model = models.Mlp(49 if "odd" in spec.sizes else 48)
    model.layers = torch.nn.ModuleList(Layer(16, 24) for _ in range(LAYERS))
    model = model.to(spec.torch_dtype)
    models.stir(model, spec.seed)
    return model


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Each position's own id: what a rank's positions need is with it."""
    return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def _greet_others(stage: Any) -> None:
    """Torch greets all neighbors. On a V one is on the own rank, where gloo has no way to."""
    greetings = stage._get_init_p2p_neighbors_ops
    stage._get_init_p2p_neighbors_ops = lambda: [
        op for op in greetings() if op.group_peer != stage.group_rank
    ]


def _pipeline(spec: Spec, model: Any, device_mesh: Any) -> Any:
    from torch.distributed import pipelining
    from torch.distributed.fsdp import fully_shard

    pp, rank = device_mesh["pp"].size(), device_mesh["pp"].get_local_rank()
    count = pp if spec.variant in SINGLE else 2 * pp
    is_v = spec.variant == "ZBVZeroBubble"
    size, stages = LAYERS // count, []
    for i in (rank, count - 1 - rank) if is_v else range(rank, count, pp):
        part = Part(model, range(i * size, (i + 1) * size))
        if "dp" in spec.degrees:
            fully_shard(part, mesh=device_mesh["dp"])
        at: dict[str, Any] = {"group": device_mesh.get_group("pp")}
        stages.append(pipelining.PipelineStage(part, i, count, torch.device("cpu"), **at))
        _greet_others(stages[-1])
    schedule = getattr(pipelining, f"Schedule{spec.variant}")
    given = stages[0] if spec.variant in SINGLE else stages
    return schedule(given, n_microbatches=MICRO_BATCHES, loss_fn=loss_of)


def _context_model(spec: Spec, model: Any, device_mesh: Any) -> Any:
    import ring_on_cpu

    options = ring_on_cpu.context._cp_options
    options.enable_load_balance = spec.variant.startswith("balanced")
    ring_on_cpu.context.set_rotate_method(
        "alltoall" if spec.variant.endswith("rotated") else "allgather"
    )
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    wrapped.context = device_mesh["cp"]
    return wrapped


def parallelize(spec: Spec, model: Any, device_mesh: Any) -> Any:
    """The schedule, or the wrapped model."""
    return (_pipeline if spec.framework == "pp" else _context_model)(spec, model, device_mesh)


def _step(spec: Spec, model: Any, optimizer: Any, parts: list[Any]) -> None:
    """Tokens are cut, and put together again, around forward and backward."""
    from torch.distributed.tensor.experimental import context_parallel

    for part in parts:
        ids = part.clone()
        if (over := getattr(model, "context", None)) is None:
            torch.autograd.backward(loss_of(model(ids), ids) / len(parts))
            continue
        with context_parallel(over, buffers=[ids], buffer_seq_dims=[1]):
            torch.autograd.backward(loss_of(model(ids), ids) / len(parts))
    if spec.clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec.clip)
    optimizer.step()
    optimizer.zero_grad()


def arguments(spec: Spec) -> dict[str, Any]:
    """What isoshard.check gets."""
    is_pipeline = spec.framework == "pp"
    found: dict[str, Any] = {
        "build": partial(build, spec),
        "parallelize": partial(parallelize, spec),
        "batch": models.ids_of(spec, per_part=MICRO_BATCHES if is_pipeline else 2, vocabulary=48),
        "optimizer": partial(models.make_optimizer, spec),
        "loss": loss_of,
    }
    return found if is_pipeline else found | {"step": partial(_step, spec)}
