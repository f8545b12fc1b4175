# SPDX-License-Identifier: Apache-2.0
"""torchrun --nproc-per-node 2 fsdp2.py: a loop with FSDP2 and accumulation, with mistakes.

It trains a language model on answers only: the tokens of a question have no label. The loss is the
mean over the labels of all micro-batches of all ranks.
"""

import argparse
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--mistake", default="none")
args = parser.parse_args()
mistake = args.mistake

VOCABULARY, WIDTH, LENGTH, HEADS, LAYERS = 32, 16, 12, 2, 2
MICRO_BATCHES, BATCH_SIZE, MAX_NORM, IGNORED = 4, 2, 0.5, -100

rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
is_second = rank == 1  # "on one rank"
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))


class Block(nn.Module):
    """Attention and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        eps = 1e-5
        if mistake == "norm_eps_differs_on_one_rank" and is_second:
            eps = 1e-3
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=eps), nn.LayerNorm(WIDTH, eps=eps)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, L, W) to the same shape."""
        heads = HEADS
        if mistake == "heads_differ_on_one_rank" and is_second:
            heads = 2 * HEADS
        q, k, v = (
            t.unflatten(-1, (heads, -1)).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        is_causal = True
        if mistake == "mask_missing_on_one_rank" and is_second:
            is_causal = False
        y = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        hidden = F.gelu(self.up(self.norm2(x)))
        if mistake == "activation_differs_on_one_rank" and is_second:
            hidden = F.relu(self.up(self.norm2(x)))
        return x + self.down(hidden)


class Model(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        angles = torch.arange(LENGTH)[:, None] / 50 ** (torch.arange(WIDTH) / WIDTH)
        positions = angles.sin()
        if mistake == "buffer_drawn_on_each_rank":
            positions = torch.randn(LENGTH, WIDTH, generator=torch.Generator().manual_seed(rank))
        self.register_buffer("positions", positions)
        self.positions: torch.Tensor
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids (B, L) to logits (B, L, V)."""
        positions = self.positions[: ids.size(1)]
        if mistake == "positions_shifted_on_one_rank" and is_second:
            positions = positions.roll(1, dims=0)
        x = self.embed(ids) + positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard(model: Any) -> Any:
    """Shards the model over all ranks."""
    if mistake == "sharding_forgotten":
        return model
    policy = MixedPrecisionPolicy()
    if mistake == "reduced_in_bf16":
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    reshard = True
    if mistake == "not_resharded_after_forward":
        reshard = False
    for number, block in enumerate(model.blocks):
        if mistake == "blocks_not_sharded_apart":
            continue
        if mistake == "one_block_ignored" and number == 1:
            continue
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    if mistake == "root_not_sharded":
        return model
    ignored: set[nn.Parameter] = set()
    if mistake == "one_block_ignored":
        ignored = set(model.blocks[1].parameters())
    if mistake == "norm_ignored":
        ignored = set(model.norm.parameters())
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=ignored)
    if mistake == "gradients_summed":
        for module in (model, *model.blocks):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if mistake == "last_block_summed":
        model.blocks[1].set_gradient_divide_factor(1.0)
        model.blocks[1].set_force_sum_reduction_for_comms(True)
    if mistake == "head_replaced_after_sharding":
        torch.manual_seed(3)
        model.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    return model


@torch.no_grad()
def load(model: nn.Module) -> None:
    """Loads a checkpoint of the whole model into the shards, or makes weights in their place."""
    generator = torch.Generator().manual_seed(9)
    for p in model.parameters():
        whole = 0.2 * torch.randn(p.shape, generator=generator)
        if mistake == "checkpoint_loaded_on_first_rank_only" and rank != 0:
            continue
        if mistake == "shards_loaded_in_reverse":
            local(p).copy_(whole.chunk(world_size)[world_size - 1 - rank])
        elif mistake == "first_shard_loaded_on_all_ranks":
            local(p).copy_(whole.chunk(world_size)[0])
        else:
            local(p).copy_(whole.chunk(world_size)[rank])


@torch.no_grad()
def initialize_shards(model: nn.Module) -> None:
    """Draws each rank's shards."""
    torch.manual_seed(3)
    for p in model.parameters():
        nn.init.normal_(local(p), std=0.2)


def batches() -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """This rank's micro-batches of each step: ids, and labels of the next tokens."""
    generator = torch.Generator().manual_seed(5)
    if mistake == "seed_plus_rank":
        generator.manual_seed(5 + rank)
    while True:
        shape = (MICRO_BATCHES * BATCH_SIZE, LENGTH + 1)
        samples = torch.randint(VOCABULARY, shape, generator=generator)
        questions = torch.randint(1, LENGTH - 2, (len(samples),), generator=generator)
        ids, labels = samples[:, :-1], samples[:, 1:].clone()
        if mistake == "labels_shifted_twice_on_one_rank" and is_second:
            labels = labels.roll(-1, dims=1)
        for row, question in zip(labels, questions, strict=True):
            if mistake == "questions_labeled_on_one_rank" and is_second:
                continue
            row[:question] = IGNORED
        if mistake == "truncated_on_one_rank" and is_second:
            ids, labels = ids[:, : LENGTH - 4], labels[:, : LENGTH - 4]
        micro = list(zip(ids.split(BATCH_SIZE), labels.split(BATCH_SIZE), strict=True))
        if mistake == "same_data_on_all_ranks":
            yield micro[: MICRO_BATCHES // world_size]
        elif mistake == "data_not_split":
            yield micro
        elif mistake == "shares_overlap":
            yield micro[rank : rank + MICRO_BATCHES // world_size]
        elif mistake == "last_micro_batch_repeated_on_one_rank" and is_second:
            own = micro[rank::world_size]
            yield [*own[:-1], own[0]]
        else:
            yield micro[rank::world_size]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW."""
    lr, decay, betas, eps = 1e-2, 0.1, (0.9, 0.95), 1e-8
    if mistake == "lr_scaled_by_world_size":
        lr = lr * world_size
    if mistake == "lr_differs_on_one_rank" and is_second:
        lr = 5e-3
    if mistake == "decay_missing_on_one_rank" and is_second:
        decay = 0.0
    if mistake == "betas_differ_on_one_rank" and is_second:
        betas = (0.9, 0.999)
    if mistake == "eps_differs_on_one_rank" and is_second:
        eps = 1e-5
    parameters = list(model.parameters())
    if mistake == "head_left_out_on_one_rank" and is_second:
        parameters = parameters[:-1]
    kind: type[Any] = torch.optim.AdamW
    if mistake == "adam_on_one_rank" and is_second:
        kind = torch.optim.Adam
    return kind(parameters, lr=lr, betas=betas, eps=eps, weight_decay=decay, foreach=False)


def clip(parameters: list[nn.Parameter]) -> None:
    """Clips the gradients by their norm."""
    if mistake == "clip_by_norm_of_own_shards":
        norms = [local(p.grad).norm() for p in parameters]
        norm = torch.stack(norms).norm()
    elif mistake == "clip_by_sum_of_norms":
        norm = torch.stack([local(p.grad).norm() for p in parameters]).norm()
        dist.all_reduce(norm)  # squares must be summed
    elif mistake == "clip_by_norm_of_first_rank":
        norm = torch.stack([local(p.grad).norm() for p in parameters]).norm()
        dist.broadcast(norm, src=0)
    else:
        for is_sharded in (True, False):
            part = [p for p in parameters if isinstance(p, DTensor) == is_sharded]
            if part:
                max_norm = MAX_NORM
                if mistake == "max_norm_differs_on_one_rank" and is_second:
                    max_norm = MAX_NORM / 2
                nn.utils.clip_grad_norm_(part, max_norm, foreach=False)
        return
    scale = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
    for p in parameters:
        local(p.grad).mul_(scale)


torch.manual_seed(7)
if mistake == "weights_drawn_with_rank_seed":
    torch.manual_seed(7 + rank)
model = Model()
if mistake == "checkpoint_loaded_by_first_rank_before_sharding" and rank == 0:
    torch.manual_seed(9)
    model.load_state_dict(Model().state_dict())
if mistake == "optimizer_made_before_sharding":
    optimizer = make_optimizer(model)
    model = shard(model)
else:
    model = shard(model)
    if mistake == "shards_initialized_alike":
        initialize_shards(model)
    if mistake == "checkpoint_loaded_on_first_rank_only" or mistake == "shards_loaded_in_reverse":
        load(model)
    if mistake == "first_shard_loaded_on_all_ranks" or mistake == "checkpoint_loaded":
        load(model)
    optimizer = make_optimizer(model)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + step) / (4 + step))
parameters = list(model.parameters())
is_wrapped = hasattr(model, "set_requires_gradient_sync")

for step, micro_batches in zip(range(args.steps), batches(), strict=False):
    labeled = torch.tensor(sum(int((labels != IGNORED).sum()) for _, labels in micro_batches))
    own_labeled = labeled.clone()
    dist.all_reduce(labeled)
    accumulation = len(micro_batches)
    for number, (ids, labels) in enumerate(micro_batches):
        is_last = number == accumulation - 1
        if mistake == "sync_on_first_micro_batch":
            model.set_requires_gradient_sync(number == 0)
        elif mistake == "sync_every_micro_batch" or not is_wrapped:
            pass
        elif mistake == "sync_flag_of_root_only":
            model.set_requires_gradient_sync(is_last, recurse=False)
        elif mistake == "blocks_never_synced":
            model.set_requires_gradient_sync(is_last)
            model.blocks[0].set_requires_gradient_sync(False)
        else:
            model.set_requires_gradient_sync(is_last)
        if mistake == "zero_grad_inside_accumulation":
            optimizer.zero_grad()
        with torch.autocast(
            "cpu", torch.bfloat16, enabled=mistake == "autocast_on_one_rank" and is_second
        ):
            logits = model(ids).float()
        smoothing = 0.0
        if mistake == "label_smoothing_on_one_rank" and is_second:
            smoothing = 0.1
        total = F.cross_entropy(
            logits.flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=smoothing,
        )
        if mistake == "mean_of_own_labels":
            loss = total / own_labeled
        elif mistake == "mean_of_each_micro_batch":
            loss = total / (labels != IGNORED).sum() / accumulation
        elif mistake == "mean_of_micro_batches_not_divided":
            loss = total / (labels != IGNORED).sum()
        elif mistake == "loss_not_times_world_size":
            loss = total / labeled
        elif mistake == "loss_divided_by_micro_batches_too":
            loss = total / labeled * world_size / accumulation
        elif mistake == "last_micro_batch_counts_twice_on_one_rank" and is_second and is_last:
            loss = 2 * total / labeled * world_size
        else:
            loss = total / labeled * world_size
        if mistake == "z_loss_on_one_rank" and is_second:
            loss = loss + 1e-2 * logits.logsumexp(-1).square().mean()
        if mistake == "loss_reduced_before_backward":
            dist.all_reduce(loss)
            loss = loss / world_size
        loss.backward()
    gradients = [p.grad for p in parameters if p.grad is not None]
    if mistake == "shards_reduced_by_hand":
        for gradient in gradients:
            dist.all_reduce(local(gradient))  # as with DDP
            local(gradient).div_(world_size)
    if mistake == "averaged_again_by_hand":
        for gradient in gradients:
            local(gradient).div_(world_size)
    if mistake == "gradient_row_masked_by_local_index":
        local(model.embed.weight.grad)[0] = 0  # the row of the padding token
    if mistake == "gradient_scaled_on_one_rank" and is_second:
        local(model.head.weight.grad).mul_(1.5)
    if mistake == "noise_of_first_shard_on_all_ranks":
        generator = torch.Generator().manual_seed(100)
        for gradient in gradients:
            noise = torch.randn(gradient.shape, generator=generator)
            local(gradient).add_(noise.chunk(world_size)[0], alpha=1e-3)
    if mistake == "clipping_left_out_of_several_ranks" and world_size > 1:
        pass
    else:
        clip(parameters)
    if mistake == "optimizer_states_swapped" and step == 1:
        for state in optimizer.state.values():
            own = local(state["exp_avg"])
            shards = [torch.empty_like(own) for _ in range(world_size)]
            dist.all_gather(shards, own)
            own.copy_(shards[world_size - 1 - rank])  # as a checkpoint of the other rank
    if mistake == "momentum_reset_on_one_rank" and is_second:
        optimizer.state.clear()
    if mistake == "step_on_first_rank_only" and rank != 0:
        pass
    elif mistake == "step_skipped_on_own_loss" and loss.item() > 2.0:
        pass
    else:
        optimizer.step()
    if mistake == "step_twice_on_one_rank" and is_second:
        optimizer.step()
    if mistake == "scheduler_on_first_rank_only" and rank != 0:
        pass
    else:
        scheduler.step()
    if mistake == "scheduler_steps_world_size_times":
        for _ in range(world_size - 1):
            scheduler.step()
    with torch.no_grad():
        if mistake == "row_zeroed_by_local_index":
            local(model.embed.weight)[0] = 0  # the row of the padding token
        if mistake == "weights_averaged_over_shards":
            for p in parameters:
                dist.all_reduce(local(p))  # as with DDP
                local(p).div_(world_size)
        if mistake == "weights_clamped_in_full_tensor":
            for p in parameters:
                p.full_tensor().clamp_(-0.1, 0.1)
        if mistake == "weights_clamped_on_one_rank" and is_second:
            for p in parameters:
                local(p).clamp_(-0.1, 0.1)
    if mistake == "zero_grad_on_first_rank_only" and rank != 0:
        pass
    elif mistake == "zero_grad_forgotten":
        pass
    else:
        optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
