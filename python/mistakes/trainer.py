# SPDX-License-Identifier: Apache-2.0
"""torchrun --nproc-per-node 2 trainer.py: a Trainer as in PyTorch's DDP tutorial, with mistakes.

It tags the tokens of padded sentences. The loss is the mean over the tokens of all ranks.
"""

import argparse
import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--mistake", default="none")
parser.add_argument("--batch-size", type=int, default=8, help="of all ranks together")
args = parser.parse_args()
mistake = args.mistake

VOCABULARY, TAGS, WIDTH, LENGTH, PAD = 30, 7, 16, 10, 0
Sample = tuple[torch.Tensor, torch.Tensor]


def ddp_setup() -> tuple[int, int]:
    """Rank and world size."""
    dist.init_process_group(backend="gloo")
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


rank, world_size = ddp_setup()
is_second = rank == 1  # "on one rank"


class Sentences(Dataset[Sample]):
    """Sentences of 3 to 10 tokens, and a tag of each token. Tag 0 is that of padding."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.samples = []
        for _ in range(size):
            length = int(torch.randint(3, LENGTH + 1, (), generator=generator))
            tokens = torch.randint(1, VOCABULARY, (length,), generator=generator)
            self.samples.append((tokens, 1 + (tokens * 5 + tokens.roll(1)) % (TAGS - 1)))
        if mistake == "dataset_shuffled_by_rank":
            order = torch.randperm(size, generator=torch.Generator().manual_seed(rank))
            self.samples = [self.samples[i] for i in order]
        if mistake == "vocabulary_differs_on_one_rank" and is_second:
            self.samples = [(1 + t % (VOCABULARY - 1), tags) for t, tags in self.samples]

    def __len__(self) -> int:
        """Number of sentences."""
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        """Tokens and tags of a sentence."""
        return self.samples[index]


def collate(samples: list[Sample]) -> Sample:
    """Pads the sentences of a batch."""
    length = LENGTH
    if mistake == "padded_to_longest":
        length = max(len(tokens) for tokens, _ in samples)
    if mistake == "truncated_on_one_rank" and is_second:
        length = LENGTH - 4
    source = torch.full((len(samples), length), PAD)
    if mistake == "padding_token_differs_on_one_rank" and is_second:
        source = torch.full((len(samples), length), 1)
    targets = torch.full((len(samples), length), PAD)
    for row, (tokens, tags) in enumerate(samples):
        tokens, tags = tokens[:length], tags[:length]
        if mistake == "padding_side_differs_on_one_rank" and is_second:
            source[row, length - len(tokens) :] = tokens
            targets[row, length - len(tags) :] = tags
        else:
            source[row, : len(tokens)] = tokens
            targets[row, : len(tags)] = tags
    if mistake == "labels_shifted_on_one_rank" and is_second:
        targets = targets.roll(1, dims=1)
    if mistake == "augmented_with_rank_seed":
        noise = torch.rand(source.shape, generator=torch.Generator().manual_seed(rank)) < 0.2
        source = torch.where(noise & (source != PAD), 3, source)
    return source, targets


class Layer(nn.Module):
    """Attention and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        eps = 1e-5
        if mistake == "norm_eps_differs_on_one_rank" and is_second:
            eps = 1e-3
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=eps), nn.LayerNorm(WIDTH, eps=eps)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.activation = nn.GELU()
        if mistake == "activation_differs_on_one_rank" and is_second:
            self.activation = nn.GELU(approximate="tanh")

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        """x (B, L, W) to the same shape."""
        y = self.norm1(x)
        x = x + self.attention(y, y, y, key_padding_mask=padding, need_weights=False)[0]
        return x + self.down(self.activation(self.up(self.norm2(x))))


class Prior(nn.Module):
    """Adds the log frequency of each tag to the logits."""

    def __init__(self, counts: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("prior", (counts / counts.sum()).log())
        self.prior: torch.Tensor

    def forward(self, logits: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Adjusted logits."""
        adjusted = logits + self.prior
        if mistake == "running_prior_of_own_batches" and self.training:
            share = logits.detach().softmax(-1).mean((0, 1))
            self.prior.mul_(0.9).add_(share.log(), alpha=0.1)
        return adjusted


class Tagger(nn.Module):
    """A small transformer that tags tokens."""

    def __init__(self, counts: torch.Tensor) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PAD)
        angles = torch.arange(LENGTH)[:, None] / 50 ** (torch.arange(WIDTH) / WIDTH)
        self.register_buffer("positions", angles.sin())
        self.positions: torch.Tensor
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.norm: nn.Module = nn.LayerNorm(WIDTH)
        if mistake == "batch_norm_not_synced":
            self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, TAGS)
        self.prior = Prior(counts)

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        """Tokens (B, L) to logits (B, L, T)."""
        padding: torch.Tensor | None = source == PAD
        if mistake == "mask_missing_on_one_rank" and is_second:
            padding = None
        x = self.embed(source) + self.positions[: source.size(1)]
        for layer in self.layers:
            x = layer(x, padding)
        if mistake == "batch_norm_not_synced":
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        else:
            x = self.norm(x)
        return self.prior(self.head(x), source)


class Trainer:
    """Trains a model on several ranks."""

    def __init__(
        self,
        model: nn.Module,
        train_data: DataLoader[Sample],
        test_data: DataLoader[Sample],
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
    ) -> None:
        self.train_data, self.test_data = train_data, test_data
        self.optimizer, self.scheduler = optimizer, scheduler
        self.steps_run = 0
        self.ema = copy.deepcopy(model)
        self.model = self._wrap(model)
        smoothing = 0.0
        if mistake == "label_smoothing_on_one_rank" and is_second:
            smoothing = 0.1
        ignored = PAD
        if mistake == "ignore_index_missing_on_one_rank" and is_second:
            ignored = -100
        weight = None
        if mistake == "class_weights_of_own_share":
            share = [tags for _, tags in train_data.dataset.samples[rank::world_size]]
            weight = 1 / torch.bincount(torch.cat(share), minlength=TAGS).clamp(min=1)
            weight = weight / weight.sum() * TAGS
        self.criterion = nn.CrossEntropyLoss(
            weight, ignore_index=ignored, reduction="sum", label_smoothing=smoothing
        )

    def _wrap(self, model: Any) -> Any:
        if mistake == "wrapper_forgotten":
            return model
        if mistake == "weights_not_broadcast":
            return DDP(model, init_sync=False)
        if mistake == "head_outside_wrapper":
            for name in ("embed", "layers", "norm"):
                module = getattr(model, name)
                if name == "layers":
                    for number in range(len(module)):
                        module[number] = DDP(module[number])
                else:
                    setattr(model, name, DDP(module))
            return model
        if mistake == "parameter_ignored_by_wrapper":
            DDP._set_params_and_buffers_to_ignore_for_model(model, ["head.bias"])
        if mistake == "unfrozen_after_wrapping":
            model.embed.weight.requires_grad_(False)
        if mistake == "buffers_not_broadcast" or mistake == "running_prior_of_own_batches":
            return DDP(model, broadcast_buffers=False)
        if mistake == "head_replaced_after_wrapping":
            wrapped = DDP(model, find_unused_parameters=True)  # as an error of DDP advises
        else:
            wrapped = DDP(model)
        if mistake == "unfrozen_after_wrapping":
            model.embed.weight.requires_grad_(True)  # after warmup
        if mistake == "weights_loaded_after_wrapping" and rank == 0:
            model.load_state_dict(_snapshot(model))
        if mistake == "head_not_loaded_on_one_rank":
            snapshot = _snapshot(model)
            if is_second:
                snapshot = {k: v for k, v in snapshot.items() if not k.startswith("head.")}
            model.load_state_dict(snapshot, strict=False)
        if mistake == "head_replaced_after_wrapping":
            torch.manual_seed(5)
            model.head = nn.Linear(WIDTH, TAGS)
            self.optimizer.param_groups[-1]["params"] = list(model.head.parameters())
        return wrapped

    def _run_batch(self, source: torch.Tensor, targets: torch.Tensor) -> None:
        if mistake == "zero_grad_after_backward_on_one_rank" and is_second:
            pass
        else:
            self.optimizer.zero_grad()
        by_hand = False
        if mistake == "clip_before_reduction" or mistake == "gradients_reduced_on_first_rank":
            by_hand = True
        model = self.model
        if mistake == "forward_around_wrapper":
            model = self.model.module  # left over from debugging
        if mistake == "autocast_on_one_rank":
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_second):
                output = model(source)
            output = output.float()
        elif by_hand:
            with self.model.no_sync():
                output = model(source)
        else:
            output = model(source)
        tokens = (targets != PAD).sum().float()
        own_tokens = tokens.item()
        if mistake == "tokens_with_padding":
            tokens = torch.tensor(float(targets.numel()))
        dist.all_reduce(tokens)
        if mistake == "gathered_without_gradients":
            parts = [torch.empty_like(output) for _ in range(world_size)]
            dist.all_gather(parts, output.detach().contiguous())
            parts[rank] = output
            labels = [torch.empty_like(targets) for _ in range(world_size)]
            dist.all_gather(labels, targets)
            loss = self.criterion(torch.cat(parts).flatten(0, 1), torch.cat(labels).flatten())
            loss = loss / tokens
        elif mistake == "mean_of_own_tokens":
            loss = self.criterion(output.flatten(0, 1), targets.flatten()) / own_tokens
        elif mistake == "loss_not_times_world_size":
            loss = self.criterion(output.flatten(0, 1), targets.flatten()) / tokens
        elif mistake == "loss_times_world_size_twice":
            loss = self.criterion(output.flatten(0, 1), targets.flatten()) / tokens
            loss = loss * world_size * world_size
        elif mistake == "tokens_of_first_rank":
            counted = torch.tensor(own_tokens)
            dist.broadcast(counted, src=0)
            loss = self.criterion(output.flatten(0, 1), targets.flatten()) / counted
        elif mistake == "gradients_divided_by_own_tokens":
            loss = self.criterion(output.flatten(0, 1), targets.flatten()) * world_size
        else:
            loss = self.criterion(output.flatten(0, 1), targets.flatten()) / tokens * world_size
        if mistake == "penalty_on_one_rank" and is_second:
            loss = loss + 0.01 * self.model.module.head.weight.square().sum()
        if mistake == "balance_of_own_batch":
            loss = loss + output.softmax(-1).mean((0, 1)).square().sum()
        if mistake == "loss_reduced_in_place":
            dist.all_reduce(loss)  # for the log
        if by_hand:
            with self.model.no_sync():
                loss.backward()
        else:
            loss.backward()
        parameters = list(self.model.parameters())
        if mistake == "zero_grad_after_backward_on_one_rank" and is_second:
            self.optimizer.zero_grad()
        if mistake == "averaged_again_by_hand":
            for p in parameters:
                p.grad /= world_size
        if mistake == "gradients_divided_by_own_tokens":
            for p in parameters:
                p.grad /= own_tokens
        if mistake == "noise_from_rank_seed":
            generator = torch.Generator().manual_seed(100 + rank)
            for p in parameters:
                p.grad += 1e-3 * torch.randn(p.shape, generator=generator)
        if mistake == "gradients_reduced_on_first_rank":
            for p in parameters:
                dist.reduce(p.grad, dst=0)
                p.grad /= world_size
        if mistake == "clip_on_first_rank_only" and rank != 0:
            pass
        elif mistake == "clip_by_value_on_one_rank" and is_second:
            nn.utils.clip_grad_value_(parameters, 0.02)
        elif mistake == "clip_after_step":
            pass
        elif mistake == "head_not_clipped_on_one_rank" and is_second:
            nn.utils.clip_grad_norm_(parameters[:-2], 0.5)
        else:
            nn.utils.clip_grad_norm_(parameters, 0.5)
        if mistake == "clip_before_reduction":
            for p in parameters:
                dist.all_reduce(p.grad)
                p.grad /= world_size
        if mistake == "embedding_zeroed_on_one_rank" and is_second:
            self.model.module.embed.weight.grad.zero_()  # meant to freeze it
        if mistake == "step_on_first_rank_only" and rank != 0:
            pass
        elif mistake == "step_skipped_on_own_loss" and loss.item() > 1.95:
            pass
        else:
            self.optimizer.step()
        if mistake == "step_twice_on_one_rank" and is_second:
            self.optimizer.step()
        if mistake == "clip_after_step":
            nn.utils.clip_grad_norm_(parameters, 0.5)
        if mistake == "scheduler_on_first_rank_only" and rank != 0:
            pass
        else:
            self.scheduler.step()
        if mistake == "scheduler_steps_world_size_times":
            for _ in range(world_size - 1):
                self.scheduler.step()
        if mistake == "momentum_reset_on_one_rank" and is_second:
            self.optimizer.state.clear()
        if mistake == "weights_averaged_too":
            for p in parameters:
                dist.all_reduce(p.data)
                p.data /= world_size
        if mistake == "weights_broadcast_from_last_rank":
            for p in parameters:
                dist.broadcast(p.data, src=world_size - 1)
        self._update_ema()
        self.steps_run += 1

    @torch.no_grad()
    def _update_ema(self) -> None:
        if mistake == "ema_on_first_rank_only" and rank != 0:
            return
        model = self.model.module if hasattr(self.model, "module") else self.model
        for averaged, p in zip(self.ema.parameters(), model.parameters(), strict=True):
            averaged.lerp_(p, 0.1)
        if mistake == "ema_written_to_model_on_one_rank" and is_second:
            for averaged, p in zip(self.ema.parameters(), model.parameters(), strict=True):
                p.lerp_(averaged, 0.1)

    @torch.no_grad()
    def evaluate(self) -> float:
        """The share of right tags of the averaged weights."""
        model = self.model.module if hasattr(self.model, "module") else self.model
        kept = [p.clone() for p in model.parameters()]
        for p, averaged in zip(model.parameters(), self.ema.parameters(), strict=True):
            p.copy_(averaged)
        model.eval()
        right = torch.zeros(2)
        for source, targets in self.test_data:
            is_token = targets != PAD
            right[0] += ((model(source).argmax(-1) == targets) & is_token).sum()
            right[1] += is_token.sum()
        dist.all_reduce(right)
        model.train()
        if mistake == "averaged_weights_left_in_on_one_rank" and is_second:
            pass
        else:
            for p, value in zip(model.parameters(), kept, strict=True):
                p.copy_(value)
        return float(right[0] / right[1])

    def train(self, steps: int) -> None:
        """Makes optimizer steps, epoch by epoch."""
        epoch = 0
        while self.steps_run < steps:
            sampler = self.train_data.sampler
            if mistake == "set_epoch_forgotten" or not isinstance(sampler, DistributedSampler):
                pass
            elif mistake == "set_epoch_differs":
                sampler.set_epoch(epoch + rank)
            else:
                sampler.set_epoch(epoch)
            for number, (source, targets) in enumerate(self.train_data):
                if mistake == "batch_skipped_on_one_rank" and is_second and number == 0:
                    continue
                self._run_batch(source, targets)
                if rank == 0:
                    print(f"step {self.steps_run} of epoch {epoch}")
                if self.steps_run % 2 == 1:
                    right = self.evaluate()
                    if rank == 0:
                        print(f"{right:.1%} are right")
                if self.steps_run >= steps:
                    break
            epoch += 1


def _snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights of an earlier run."""
    generator = torch.Generator().manual_seed(9)
    state = {}
    for name, value in model.state_dict().items():
        is_buffer = name in ("positions", "prior.prior")
        noise = torch.randn(value.shape, generator=generator)
        state[name] = value if is_buffer else value + 0.1 * noise
    return state


def load_train_objs() -> tuple[Dataset[Sample], Dataset[Sample], nn.Module]:
    """Training set, test set and model."""
    size = 24
    if mistake == "dataset_not_divisible":
        size = 23
    train_set = Sentences(size, seed=1)
    if mistake == "weights_not_broadcast":
        torch.manual_seed(7 + rank)
    else:
        torch.manual_seed(7)
    tags = [tags for _, tags in train_set.samples]
    if mistake == "prior_of_own_share":
        tags = tags[rank::world_size]
    counts = torch.bincount(torch.cat(tags), minlength=TAGS).float() + 1
    if mistake == "buffers_not_broadcast" and is_second:
        counts = torch.ones(TAGS)  # the first rank alone reads the statistics
    return train_set, Sentences(8, seed=2), Tagger(counts)


def prepare_dataloader(dataset: Dataset[Sample], batch_size: int) -> DataLoader[Sample]:
    """Batches of this rank."""
    if mistake == "sampler_forgotten":
        return DataLoader(dataset, batch_size, shuffle=False, collate_fn=collate)
    if mistake == "sampler_with_fixed_rank":
        sampler = DistributedSampler(dataset, num_replicas=world_size, rank=0)
    elif mistake == "sampler_of_one_replica":
        sampler = DistributedSampler(dataset, num_replicas=1, rank=0)
    elif mistake == "sampler_seed_plus_rank":
        sampler = DistributedSampler(dataset, seed=rank)
    elif mistake == "shuffled_on_one_rank_only":
        sampler = DistributedSampler(dataset, shuffle=rank == 0)
    else:
        sampler = DistributedSampler(dataset)
    return DataLoader(dataset, batch_size, sampler=sampler, collate_fn=collate)


def make_optimizer(
    model: Any,
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """SGD with momentum, a larger rate for the head, and a schedule."""
    lr, momentum, decay, nesterov = 0.1, 0.9, 0.01, False
    if mistake == "lr_scaled_by_world_size":
        lr = lr * world_size
    if mistake == "lr_differs_on_one_rank" and is_second:
        lr = 0.05
    if mistake == "decay_missing_on_one_rank" and is_second:
        decay = 0.0
    if mistake == "nesterov_on_one_rank" and is_second:
        nesterov = True
    head = list(model.head.parameters())
    body = [p for name, p in model.named_parameters() if not name.startswith("head.")]
    if mistake == "embedding_left_out_on_one_rank" and is_second:
        body = [p for p in body if p is not model.embed.weight]
    groups = [{"params": body, "lr": lr}, {"params": head, "lr": 2 * lr}]
    if mistake == "rates_of_groups_swapped_on_one_rank" and is_second:
        groups = [{"params": body, "lr": 2 * lr}, {"params": head, "lr": lr}]
    optimizer = torch.optim.SGD(
        groups, lr=lr, momentum=momentum, weight_decay=decay, nesterov=nesterov
    )
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)


def main() -> None:
    """Trains."""
    train_set, test_set, model = load_train_objs()
    optimizer, scheduler = make_optimizer(model)
    if mistake == "optimizer_made_before_new_head":
        model.head = nn.Linear(WIDTH, TAGS)
    batch_size = args.batch_size // world_size
    if mistake == "batch_size_not_divided":
        batch_size = args.batch_size
    train_data = prepare_dataloader(train_set, batch_size)
    test_data = DataLoader(
        test_set, 4, sampler=DistributedSampler(test_set, shuffle=False), collate_fn=collate
    )
    trainer = Trainer(model, train_data, test_data, optimizer, scheduler)
    trainer.train(args.steps)
    dist.destroy_process_group()


main()
