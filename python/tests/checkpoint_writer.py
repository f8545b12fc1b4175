# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny model for two steps and saves it as frameworks do: KIND TARGET, or several pairs.

All runs compute the same, and only the saving differs: all ranks have the same batch, their
number is a power of two, and nothing is clipped.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(6, 6, bias=False)
        self.up = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.up(self.q(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.block = Block()
        self.head = nn.Linear(7, 5, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(ids)))


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


IDS = torch.arange(8) % 5


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(IDS).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save_ddp(target: Path) -> None:
    model = nn.parallel.DistributedDataParallel(build())
    optimizer = adamw(model)
    train(model, optimizer)
    if dist.get_rank() == 0:
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}
        torch.save(content, target)


def save_dcp(target: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    model = build()
    fully_shard(model.block)
    fully_shard(model)
    optimizer = adamw(model)
    train(model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state, "epoch": 1}, checkpoint_id=target)


def save_megatron(target: Path) -> None:
    """The same tensors under the keys of Megatron's optimizer, cut by hand over two ranks."""
    torch.cuda.current_device = lambda: "cpu"  # it gathers on a device
    torch.cuda.synchronize = lambda: None
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    model = build()
    optimizer = adamw(model)
    train(model, optimizer)
    rank, state = dist.get_rank(), {}

    def add(key: str, whole: torch.Tensor) -> None:
        if whole.dim() == 0 or whole.shape[0] % 2:
            state[key] = ShardedTensor.from_rank_offsets(key, whole, replica_id=rank)
        else:
            local = whole.chunk(2)[rank].clone()
            state[key] = ShardedTensor.from_rank_offsets(key, local, (0, rank, 2))

    for name, parameter in model.named_parameters():
        add(name, parameter.detach())
        add(f"optimizer.state.fp32_param.{name}", parameter.detach().clone())
        for moment in ("exp_avg", "exp_avg_sq", "step"):
            add(f"optimizer.state.{moment}.{name}", optimizer.state[parameter][moment])
    if rank == 0:
        target.mkdir()
    dist.barrier()
    dist_checkpointing.save({**state, "iteration": 2}, str(target))


def save_deepspeed(target: Path, stage: int, bf16: bool) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed("gloo")
    model = build()
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": bf16},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
    for _ in range(2):
        engine.backward(engine(IDS).float().square().mean())
        engine.step()
    engine.save_checkpoint(str(target), tag="step2")


def main() -> None:
    torch.set_num_threads(1)
    for kind, name in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        if kind.startswith("zero"):
            save_deepspeed(Path(name), int(kind[4]), kind.endswith("bf16"))
            continue
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        {"ddp": save_ddp, "dcp": save_dcp, "megatron": save_megatron}[kind](Path(name))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
