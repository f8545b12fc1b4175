# SPDX-License-Identifier: Apache-2.0
"""Training steps of PyTorch and DeepSpeed on CPU ranks, as one process each: what side_by_side.py
starts. Each function makes a step of Hugging Face's Qwen2: forward, loss, backward, clipping by the
global norm and AdamW.
"""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

RATE, DECAY, CLIP = 1e-5, 0.01, 1.0


def model_of(spec):
    """Hugging Face's model of a config.json's fields."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(**{k: v for k, v in spec["config"].items() if k != "model_type"})
    dtype = getattr(torch, spec["dtype"])
    return Qwen2ForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa").train()


def plain_step(model, parameters=None):
    """A step of an optimizer over what this rank holds."""
    parameters = list(parameters or model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY)

    def step(ids):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def eager(spec):
    return plain_step(model_of(spec))


def ddp(spec):
    return plain_step(torch.nn.parallel.DistributedDataParallel(model_of(spec)))


def fsdp2(spec):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = model_of(spec)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plain_step(model)


def dtensor_tp(spec):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = model_of(spec)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    columns += ("mlp.gate_proj", "mlp.up_proj")
    plan = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    # sharded and whole parameters cannot be stepped together by one foreach kernel
    kinds = {}
    for parameter in model.parameters():
        kinds.setdefault(type(parameter.data), []).append(parameter)
    optimizers = [
        torch.optim.AdamW(group, lr=RATE, weight_decay=DECAY) for group in kinds.values()
    ]

    def step(ids):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        norms = []
        for group in kinds.values():
            norm = torch.nn.utils.get_total_norm([p.grad for p in group])
            norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        total = torch.linalg.vector_norm(torch.stack(norms))
        for group in kinds.values():
            torch.nn.utils.clip_grads_with_norm_(group, CLIP, total)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return step


def deepspeed_engine(spec, tp, stage):
    import deepspeed

    os.environ["LOCAL_SIZE"] = os.environ["WORLD_SIZE"]
    deepspeed.init_distributed("gloo")
    dtype = getattr(torch, spec["dtype"])
    model = model_of(spec)
    settings = {
        "train_micro_batch_size_per_gpu": spec["batch_size"],
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == torch.bfloat16},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": RATE, "weight_decay": DECAY, "torch_adam": True},
        },
    }
    if tp > 1:
        model = deepspeed.tp_model_init(model, tp_size=tp, dtype=dtype)
        settings["tensor_parallel"] = {"autotp_size": tp}
    engine = deepspeed.initialize(model=model, config=settings)[0]

    def step(ids):
        engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
        engine.step()

    return step


def deepspeed_autotp(spec):
    return deepspeed_engine(spec, tp=dist_size(), stage=0)


def deepspeed_zero1(spec):
    return deepspeed_engine(spec, tp=1, stage=1)


def deepspeed_zero2(spec):
    return deepspeed_engine(spec, tp=1, stage=2)


def pipeline(spec):
    """1F1B of torch.distributed.pipelining, the layers cut in halves."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    whole = model_of(spec).model
    head = model_of(spec).lm_head
    rank, size = dist.get_rank(), dist.get_world_size()
    count = len(whole.layers) // size

    class Part(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = whole.embed_tokens if rank == 0 else None
            self.layers = whole.layers[rank * count : (rank + 1) * count]
            self.rotary = whole.rotary_emb
            self.norm = whole.norm if rank == size - 1 else None
            self.head = head if rank == size - 1 else None

        def forward(self, x):
            if self.embed is not None:
                x = self.embed(x)
            places = self.rotary(x, torch.arange(x.shape[1])[None])
            for layer in self.layers:
                x = layer(x, position_embeddings=places, attention_mask=None)
                x = x[0] if isinstance(x, tuple) else x
            return x if self.head is None else self.head(self.norm(x))

    def loss_of(logits, ids):
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
        )

    part = Part()
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=spec["micro_batches"], loss_fn=loss_of)
    optimizer = torch.optim.AdamW(part.parameters(), lr=RATE, weight_decay=DECAY)

    def step(ids):
        schedule.step(*((ids,) if rank == 0 else ()), target=ids)
        parameters = [p for p in part.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters]).float() ** 2
        dist.all_reduce(norm)
        torch.nn.utils.clip_grads_with_norm_(parameters, CLIP, norm.sqrt())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def dist_size():
    return int(os.environ.get("WORLD_SIZE", "1"))


PEERS = {f.__name__: f for f in (eager, ddp, fsdp2, dtensor_tp, deepspeed_autotp)}
PEERS |= {f.__name__: f for f in (deepspeed_zero1, deepspeed_zero2, pipeline)}


def main():
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    size = dist_size()
    if size > 1 and not spec["peer"].startswith("deepspeed"):
        dist.init_process_group("gloo")
    step = PEERS[spec["peer"]](spec)
    rank = dist.get_rank() if size > 1 else 0
    # ranks of one sample see the same ids
    generator = torch.Generator().manual_seed(rank if spec["splits_batch"] else 0)
    vocabulary = spec["config"]["vocab_size"]
    shape = (spec["batch_size"] * spec["micro_batches"], spec["sequence"])
    times = []
    for i in range(spec["warmup"] + spec["steps"]):
        ids = torch.randint(0, vocabulary, shape, generator=generator)
        if size > 1:
            dist.barrier()
        start = time.perf_counter()
        step(ids)
        if i >= spec["warmup"]:
            times.append(time.perf_counter() - start)
    slowest = torch.tensor(times, dtype=torch.float64)
    if size > 1:
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        print(json.dumps({"ms": 1e3 * statistics.median(slowest.tolist())}))
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
