# SPDX-License-Identifier: Apache-2.0
# isoshard judge --mesh dp=2,tp=2 -- torchrun --nproc-per-node 4 megatron_gpt.py 2 zero sp bf16
import sys

import megatron_on_cpu  # noqa: F401  (a machine with GPUs needs none)
import torch
import torch.distributed as dist
from megatron.core import distributed, parallel_state
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

dist.init_process_group("gloo")
flags, tp = set(sys.argv[2:]), min(int(sys.argv[1]), dist.get_world_size())
parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
dp, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
torch.manual_seed(0)
is_bf16 = "bf16" in flags
kind = {"params_dtype": torch.bfloat16 if is_bf16 else torch.float32, "bf16": is_bf16}
on_cpu = {"use_cpu_initialization": True, "gradient_accumulation_fusion": False}
sizes = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4}
swiglu = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
cut = {"tensor_model_parallel_size": tp, "sequence_parallel": "sp" in flags and tp > 1}
no_dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "masked_softmax_fusion": False}
rest = {"num_query_groups": 2, **cut, **no_dropout, **on_cpu}
config = TransformerConfig(**sizes, **swiglu, **kind, **rest)
config.finalize_model_grads_func = distributed.finalize_model_grads
layers = gpt_layer_specs.get_gpt_layer_local_spec()
model = GPTModel(config, layers, 256, 32, position_embedding_type="rope")
buckets = distributed.DistributedDataParallelConfig(True, use_distributed_optimizer="zero" in flags)
model = distributed.DistributedDataParallel(config, buckets, model)
adam = OptimizerConfig(lr=1e-3, clip_grad=1.0, use_distributed_optimizer="zero" in flags, **kind)
optimizer = get_megatron_optimizer(adam, [model])


def forward_step(batches, model):
    ids, mask = next(batches), torch.triu(torch.ones(1, 1, 32, 32, dtype=torch.bool), 1)
    positions = torch.arange(32).expand(len(ids), 32)
    losses = model(ids[:, :-1], positions, mask, labels=ids[:, 1:])
    return losses, lambda losses: (losses.mean(), {})


for batch in torch.randint(0, 256, (3, 8, 33), generator=torch.Generator().manual_seed(5)):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    parts = batch.chunk(dp)[rank].chunk(2)
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter(parts), model=model,
        num_microbatches=2, seq_length=32, micro_batch_size=len(parts[0]),
    )  # fmt: skip
    optimizer.step()
