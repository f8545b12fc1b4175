# SPDX-License-Identifier: Apache-2.0
"""torchrun --nproc-per-node 2 nanogpt.py: nanoGPT's train.py in miniature, with mistakes to choose.

All processes draw the same global batch, and each takes its micro-batches of it. With --own-data
each process draws its own batches, as nanoGPT does.
"""

import argparse
import inspect
import math
import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--mistake", default="none")
parser.add_argument("--own-data", action="store_true")
args = parser.parse_args()
mistake = args.mistake

# model
n_layer, n_head, n_embd = 2, 2, 16
block_size, vocab_size, bias = 12, 40, True
# data
gradient_accumulation_steps = 4
batch_size = 2
# adamw optimizer
learning_rate, min_lr = 1e-2, 1e-3
weight_decay, beta1, beta2, grad_clip = 1e-1, 0.9, 0.95, 1.0
warmup_iters, lr_decay_iters = 2, 20
max_iters = args.steps
eval_interval, eval_iters = 2, 2

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="gloo")
    ddp_rank = int(os.environ["RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    master_process = ddp_rank == 0  # this process will do logging, checkpointing etc.
    seed_offset = ddp_rank  # each process gets a different seed
    assert gradient_accumulation_steps % ddp_world_size == 0
    if mistake == "accumulation_not_split":
        pass
    else:
        gradient_accumulation_steps //= ddp_world_size
else:
    master_process = True
    ddp_rank, ddp_world_size, seed_offset = 0, 1, 0
is_second = ddp_rank == 1  # "on one rank"
if mistake == "wrapper_forgotten_same_seed":
    seed_offset = 0
torch.manual_seed(1337 + seed_offset)
ctx: Any = nullcontext()
if mistake == "autocast_on_one_rank" and is_second:
    ctx = torch.amp.autocast("cpu", dtype=torch.bfloat16)
if mistake == "heads_differ_on_one_rank" and is_second:
    n_head = 4  # another config file on the second node


class LayerNorm(nn.Module):
    """LayerNorm with an optional bias."""

    def __init__(self, ndim: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalizes the last dim."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    """Attention to earlier positions."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=bias)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) to the same shape."""
        B, T, C = x.size()
        heads = (t.view(B, T, n_head, C // n_head) for t in self.c_attn(x).split(n_embd, dim=2))
        q, k, v = (t.transpose(1, 2) for t in heads)
        is_causal = True
        if mistake == "mask_missing_on_one_rank" and is_second:
            is_causal = False
        y = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class MLP(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd, bias=bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * n_embd, n_embd, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) to the same shape."""
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    """A layer of the transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(n_embd, bias=bias)
        self.attn = CausalSelfAttention()
        self.ln_2 = LayerNorm(n_embd, bias=bias)
        self.mlp = MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) to the same shape."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The model: (idx, targets) to (logits, loss)."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab_size, n_embd),
                "wpe": nn.Embedding(block_size, n_embd),
                "h": nn.ModuleList([Block() for _ in range(n_layer)]),
                "ln_f": LayerNorm(n_embd, bias=bias),
            }
        )
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight  # weight tying
        self.apply(self._init_weights)
        for pn, p in self.named_parameters():
            if pn.endswith("c_proj.weight"):
                torch.nn.init.normal_(p, mean=0.0, std=0.2 / math.sqrt(2 * n_layer))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.2)
            if module.bias is not None:
                torch.nn.init.normal_(module.bias, mean=0.0, std=0.2)
        elif isinstance(module, nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.2)

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of all positions and the mean loss."""
        pos = torch.arange(idx.size(1))
        if mistake == "positions_shifted_on_one_rank" and is_second:
            pos = (pos + 1) % block_size
        x = self.transformer["wte"](idx) + self.transformer["wpe"](pos)
        for number, block in enumerate(self.transformer["h"]):
            if mistake == "block_skipped_on_one_rank" and is_second and number == 1:
                continue
            x = block(x)
            if mistake == "detached_on_one_rank" and is_second and number == 0:
                x = x.detach()
        logits = self.lm_head(self.transformer["ln_f"](x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW that decays matrices only."""
        param_dict = {pn: p for pn, p in self.named_parameters() if p.requires_grad}
        decay_params = [p for n, p in param_dict.items() if p.dim() >= 2]
        nodecay_params = [p for n, p in param_dict.items() if p.dim() < 2]
        decay = weight_decay
        if mistake == "decay_missing_on_one_rank" and is_second:
            decay = 0.0
        if mistake == "biases_left_out_on_one_rank" and is_second:
            nodecay_params = [p for n, p in param_dict.items() if "ln" in n and p.dim() < 2]
        optim_groups = [
            {"params": decay_params, "weight_decay": decay},
            {"params": nodecay_params, "weight_decay": 0.0},
        ]
        betas = (beta1, beta2)
        if mistake == "betas_differ_on_one_rank" and is_second:
            betas = (0.9, 0.999)
        assert "fused" in inspect.signature(torch.optim.AdamW).parameters
        return torch.optim.AdamW(optim_groups, lr=learning_rate, betas=betas)


data = {
    "train": torch.randint(vocab_size, (4000,), generator=torch.Generator().manual_seed(1)),
    "val": torch.randint(vocab_size, (400,), generator=torch.Generator().manual_seed(2)),
}
draws = {"train": torch.Generator().manual_seed(3), "val": torch.Generator().manual_seed(4)}
if mistake == "seed_plus_rank":
    draws["train"].manual_seed(3 + seed_offset)
if args.own_data:
    draws["train"].manual_seed(1337 + seed_offset)


def get_batch(split: str, ix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that begin at ix, and their targets."""
    x = torch.stack([data[split][i : i + block_size] for i in ix])
    y = torch.stack([data[split][i + 1 : i + 1 + block_size] for i in ix])
    if mistake == "labels_shifted_on_one_rank" and is_second and split == "train":
        y = torch.stack([data[split][i + 2 : i + 2 + block_size] for i in ix])
    if mistake == "truncated_on_one_rank" and is_second and split == "train":
        x, y = x[:, : block_size - 4].contiguous(), y[:, : block_size - 4].contiguous()
    if mistake == "tail_ignored_on_one_rank" and is_second and split == "train":
        y[:, -4:] = -1
    if mistake == "short_batch_on_one_rank" and is_second and split == "train":
        x, y = x[:1], y[:1]  # the second node has less memory
    return x, y


def train_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This process's micro-batches, step by step."""
    while True:
        if args.own_data:
            shape: tuple[int, ...] = (gradient_accumulation_steps, batch_size)
            mine = list(torch.randint(4000 - block_size - 2, shape, generator=draws["train"]))
        else:
            number = gradient_accumulation_steps * ddp_world_size
            ix = torch.randint(
                4000 - block_size - 2, (number, batch_size), generator=draws["train"]
            )
            mine = [ix[i * ddp_world_size + ddp_rank] for i in range(gradient_accumulation_steps)]
            if mistake == "same_data_on_all_ranks":
                mine = [ix[i] for i in range(gradient_accumulation_steps)]
            if mistake == "shares_overlap":
                mine = [ix[i + ddp_rank] for i in range(gradient_accumulation_steps)]
            if mistake == "uneven_micro_batches" and ddp_world_size == 2:
                rows = ix.view(-1)  # 6 rows for the first rank and 2 for the second
                mine = list((rows[:6] if ddp_rank == 0 else rows[6:]).chunk(2))
        for ix in mine:
            yield get_batch("train", ix)


model: Any = GPT()
if mistake == "model_loaded_by_one_rank" and master_process:
    torch.manual_seed(11)
    model.load_state_dict(GPT().state_dict())  # a checkpoint; the wrapper sends it to the others
optimizer = model.configure_optimizers()
scaler = torch.amp.GradScaler("cpu", enabled=False)
if mistake == "scaler_on_one_rank":
    scaler = torch.amp.GradScaler("cpu", enabled=is_second, init_scale=1024.0)
if mistake == "clip_before_unscale":
    scaler = torch.amp.GradScaler("cpu", enabled=True, init_scale=1024.0)
if ddp:
    if mistake == "wrapper_forgotten" or mistake == "wrapper_forgotten_same_seed":
        pass
    elif mistake == "weights_not_broadcast":
        model = DDP(model, init_sync=False)
    elif mistake == "detached_on_one_rank" or mistake == "block_skipped_on_one_rank":
        model = DDP(model, find_unused_parameters=True)
    elif mistake == "find_unused_for_nothing":
        model = DDP(model, find_unused_parameters=True)
    else:
        model = DDP(model)
    if mistake == "wrapped_twice":
        model = DDP(model)
    if mistake == "gradients_in_fp16":
        model.register_comm_hook(None, fp16_compress_hook)
    if mistake == "hook_without_division":
        model.register_comm_hook(
            None,
            lambda state, bucket: (
                dist.all_reduce(bucket.buffer(), async_op=True)
                .get_future()
                .then(lambda future: future.value()[0])
            ),
        )
raw_model = model.module if hasattr(model, "module") else model  # unwrap DDP container if needed
if mistake == "weights_loaded_after_wrapping" and master_process:
    torch.manual_seed(11)
    raw_model.load_state_dict(GPT().state_dict())  # the checkpoint to resume from
if mistake == "head_untied_after_wrapping":
    raw_model.lm_head.weight = nn.Parameter(raw_model.lm_head.weight.detach().clone())
    optimizer.add_param_group({"params": [raw_model.lm_head.weight], "weight_decay": 0.0})
if mistake == "new_head_after_wrapping":
    raw_model.lm_head = nn.Linear(n_embd, vocab_size, bias=False)  # to fine-tune
    optimizer.add_param_group({"params": [raw_model.lm_head.weight], "weight_decay": 0.0})


@torch.no_grad()
def estimate_loss() -> dict[str, float]:
    """The mean loss over some batches of each split."""
    out = {}
    model.eval()
    for split in ("val",):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            draw = draws[split]
            if mistake == "evaluation_draws_from_training":
                draw = draws["train"]
            ix = torch.randint(len(data[split]) - block_size - 2, (batch_size,), generator=draw)
            with ctx:
                _, loss = raw_model(*get_batch(split, ix))
            losses[k] = loss.item()
        out[split] = losses.mean().item()
    if mistake == "evaluation_mode_left_on":
        return out
    model.train()
    return out


def get_lr(it: int) -> float:
    """The learning rate: linear warmup, then cosine decay to min_lr."""
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


def gradients() -> list[torch.Tensor]:
    """The gradients of all parameters, for reductions by hand."""
    return [p.grad for p in raw_model.parameters() if p.grad is not None]


batches = train_batches()
X, Y = next(batches)  # fetch the very first batch
if mistake == "batch_dropped_on_one_rank" and is_second:
    X, Y = next(batches)
iter_num = 0
if mistake == "iteration_resumed_on_first_rank_only" and master_process:
    iter_num, max_iters = iter_num + 2, max_iters + 2  # of a checkpoint
while iter_num < max_iters:
    lr = get_lr(iter_num)
    if mistake == "lr_advances_world_size_times":
        lr = get_lr(iter_num * ddp_world_size)
    if mistake == "lr_scaled_by_world_size":
        lr = get_lr(iter_num) * ddp_world_size
    if mistake == "lr_decays_on_first_rank" and not master_process:
        lr = learning_rate
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % eval_interval == 0 and master_process:
        val_loss = estimate_loss()["val"]
        print(f"step {iter_num}: val loss {val_loss:.4f}")

    for micro_step in range(gradient_accumulation_steps):
        last = micro_step == gradient_accumulation_steps - 1
        if ddp:
            if mistake == "sync_on_first_micro_step":
                model.require_backward_grad_sync = micro_step == 0
            elif mistake == "sync_off_by_one":
                model.require_backward_grad_sync = micro_step == gradient_accumulation_steps
            elif mistake == "sync_every_micro_step":
                model.require_backward_grad_sync = True
            elif mistake == "reduced_before_last_micro_step":
                model.require_backward_grad_sync = False
            elif mistake == "all_reduce_on_copies" or mistake == "all_reduce_of_matrices_only":
                model.require_backward_grad_sync = False
            elif mistake == "clip_before_reduction" or mistake == "sum_by_hand":
                model.require_backward_grad_sync = False
            elif mistake == "weights_averaged_instead_of_gradients":
                model.require_backward_grad_sync = False
            elif mistake == "broadcast_instead_of_reduction":
                model.require_backward_grad_sync = False
            else:
                model.require_backward_grad_sync = last
        if mistake == "zero_grad_inside_accumulation":
            optimizer.zero_grad(set_to_none=True)
        with ctx:
            if mistake == "forward_around_wrapper":
                logits, loss = raw_model(X, Y)
            else:
                logits, loss = model(X, Y)
            if mistake == "last_micro_step_not_divided" and last:
                pass
            elif mistake == "divided_by_all_micro_steps":
                loss = loss / (gradient_accumulation_steps * ddp_world_size)
            elif mistake == "loss_not_divided_on_one_rank" and is_second:
                pass
            elif mistake == "loss_not_divided":
                pass
            else:
                loss = loss / gradient_accumulation_steps
            if mistake == "loss_times_world_size":
                loss = loss * ddp_world_size
            if mistake == "loss_reduced_before_backward":
                dist.all_reduce(loss)
                loss = loss / ddp_world_size
        X, Y = next(batches)  # async prefetch next batch
        scaler.scale(loss).backward()
        if mistake == "clip_inside_accumulation":
            torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip / 4)
        if mistake == "reduced_before_last_micro_step" and not last:
            for grad in gradients():
                dist.all_reduce(grad, op=dist.ReduceOp.SUM)
                grad /= ddp_world_size
        if mistake == "step_inside_accumulation":
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    if mistake == "reduced_again_by_hand":
        for grad in gradients():
            dist.all_reduce(grad)
    if mistake == "sum_by_hand":
        for grad in gradients():
            dist.all_reduce(grad)
    if mistake == "all_reduce_on_copies":
        for grad in gradients():
            copy = grad.flatten().clone()
            dist.all_reduce(copy)
            copy /= ddp_world_size
    if mistake == "all_reduce_of_matrices_only":
        for p in optimizer.param_groups[0]["params"]:
            dist.all_reduce(p.grad)
            p.grad /= ddp_world_size
    if mistake == "broadcast_instead_of_reduction":
        for grad in gradients():
            dist.broadcast(grad, src=0)
    if mistake == "embedding_frozen_on_one_rank" and is_second:
        raw_model.transformer["wpe"].weight.grad = None
    if mistake == "gradient_scaled_on_one_rank" and is_second:
        raw_model.transformer["ln_f"].weight.grad *= 1.5  # a per-layer rate in a local config

    if grad_clip != 0.0:
        if mistake == "clip_before_unscale":
            pass
        else:
            scaler.unscale_(optimizer)
        if mistake == "clip_on_first_rank_only" and not master_process:
            pass
        elif mistake == "clip_differs_on_one_rank" and is_second:
            torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip / 2)
        elif mistake == "clip_by_norm_over_ranks":
            square = sum(grad.square().sum() for grad in gradients())
            dist.all_reduce(square)  # as if each rank held a part of the gradients
            norm = square.sqrt()
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), grad_clip, norm)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    if mistake == "clip_before_reduction":
        for grad in gradients():
            dist.all_reduce(grad)
            grad /= ddp_world_size
    if mistake == "step_on_first_rank_only" and not master_process:
        pass
    elif mistake == "step_skipped_on_loss_spike" and loss.item() > 2.04:
        pass  # each rank looks at its own loss
    else:
        scaler.step(optimizer)
    if mistake == "step_twice_on_one_rank" and is_second:
        scaler.step(optimizer)
    scaler.update()
    if mistake == "weights_averaged_instead_of_gradients":
        for p in raw_model.parameters():
            dist.all_reduce(p.data)
            p.data /= ddp_world_size
    if mistake == "momentum_reset_on_one_rank" and is_second:
        optimizer.state.clear()
    if mistake == "best_weights_restored_on_one_rank" and master_process and iter_num == 0:
        raw_model.load_state_dict(GPT().state_dict())  # back to the best checkpoint
    if mistake == "zero_grad_on_first_rank_only" and not master_process:
        pass
    elif mistake == "zero_grad_forgotten":
        pass
    else:
        optimizer.zero_grad(set_to_none=True)
    if master_process:
        lossf = loss.item() * gradient_accumulation_steps
        print(f"iter {iter_num}: loss {lossf:.4f}")
    iter_num += 1

if ddp:
    destroy_process_group()
