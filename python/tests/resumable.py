# SPDX-License-Identifier: Apache-2.0
"""A training that saves itself and goes on from there, with the mistakes that such scripts make.

isoshard judge --resume-at 3 -- torchrun --nproc-per-node 2 resumable.py --checkpoint {run}

`--mistake` names what is wrong; without it all is right. It is a script for test_resume.py, which
runs it in processes of its own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

SAMPLES, BATCH = 40, 8  # 5 steps are an epoch


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(self.drop(torch.tanh(self.up(x))))
        return output


def order_of(epoch: int) -> torch.Tensor:
    """The order of an epoch's samples, which depends on the epoch alone."""
    return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(100 + epoch))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--every", type=int, default=3, help="steps between two checkpoints")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--wrap", choices=["ddp", "fsdp2"], default="ddp")
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--bucket", type=float, default=25, help="of DDP, in MB")
    parser.add_argument("--decay", type=float, default=0.9, help="of the learning rate in a step")
    parser.add_argument("--mistake", default="")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if args.mistake == "no seed":
        torch.seed()
    else:
        torch.manual_seed(1)
    net = Net(args.dropout)
    model: nn.Module = net
    if args.wrap == "ddp":
        model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=args.bucket)
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(net.up)
        fully_shard(net)
    if args.optimizer == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: args.decay**step)
    torch.manual_seed(10 + rank)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(SAMPLES, 16, generator=generator)
    y = torch.randint(0, 4, (SAMPLES,), generator=generator)
    step = 0

    def file() -> Path:
        name = args.checkpoint / "state"
        return name if args.wrap == "fsdp2" else name.with_suffix(".pt")

    def save() -> None:
        if args.wrap == "fsdp2":
            weights, states = get_state_dict(model, optimizer)
            rest = {"schedule": schedule.state_dict(), "step": step}
            own = {f"random{rank}": torch.get_rng_state()}
            whole = {"model": weights, "optimizer": states, "rest": rest, **own}
            dcp.save(whole, checkpoint_id=file())
            return
        own = torch.get_rng_state()
        gathered = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(gathered, own)
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
            "step": step,
            "random": gathered,
        }
        if rank == 0:
            torch.save(state, file())

    def load() -> int:
        wrong = args.mistake
        if args.wrap == "fsdp2":
            weights, states = get_state_dict(model, optimizer)
            rest = {"schedule": schedule.state_dict(), "step": 0}
            own = {f"random{rank}": torch.get_rng_state()}
            whole = {"model": weights, "optimizer": states, "rest": rest, **own}
            whole.pop(wrong, None)  # what is loaded is written into the model's own tensors
            dcp.load(whole, checkpoint_id=file())
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
            schedule.load_state_dict(rest["schedule"])
            torch.set_rng_state(whole[f"random{rank}"])
            return int(rest["step"])
        state = torch.load(file(), weights_only=False)
        if wrong == "prefix":
            net.load_state_dict(state["model"], strict=False)
        elif wrong != "model":
            model.load_state_dict(state["model"])
        if wrong != "optimizer":
            optimizer.load_state_dict(state["optimizer"])
        if wrong != "schedule":
            schedule.load_state_dict(state["schedule"])
        if wrong != "random":
            torch.set_rng_state(state["random"][rank])
        return int(state["step"]) + (wrong == "step")

    resumed = args.checkpoint is not None and file().exists() and args.mistake != "fresh"
    if resumed:
        step = load()
    while step < args.steps:
        epoch, at = divmod(step, SAMPLES // BATCH)
        order = order_of(epoch)
        if resumed and args.mistake == "order":
            order = order_of(epoch + 50)
        if resumed and args.mistake == "skipped":
            at, resumed = 0, False
            step -= step % (SAMPLES // BATCH)
        mine = order[at * BATCH : (at + 1) * BATCH].chunk(size)[rank]
        loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        step += 1
        if args.checkpoint is not None and step % args.every == 0:
            save()
    dist.destroy_process_group()


main()
