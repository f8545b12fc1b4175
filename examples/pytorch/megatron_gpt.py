# SPDX-License-Identifier: Apache-2.0
# isoshard judge --mesh dp=2,tp=2 -- torchrun --nproc-per-node 4 megatron_gpt.py 2 zero sp bf16
import sys

import megatron_on_cpu  # noqa: F401  (a machine with GPUs needs none)
import torch
from megatron.core import distributed, parallel_state, pipeline_parallel
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.optimizer import get_megatron_optimizer
from megatron_tiny import LENGTH, VOCABULARY, batches_of, forward_step, settings_of

torch.distributed.init_process_group("gloo")
flags, tp = set(sys.argv[2:]), min(int(sys.argv[1]), torch.distributed.get_world_size())
parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
dp, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
torch.manual_seed(0)
config, buckets, adam = settings_of(flags, tp)
layers = gpt_layer_specs.get_gpt_layer_local_spec()
model = GPTModel(config, layers, VOCABULARY, LENGTH, position_embedding_type="rope")
model = distributed.DistributedDataParallel(config, buckets, model)
optimizer = get_megatron_optimizer(adam, [model])
for batch in batches_of(steps=3):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    parts = batch.chunk(dp)[rank].chunk(2)
    pipeline_parallel.get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter(parts), model=model,
        num_microbatches=2, seq_length=LENGTH, micro_batch_size=len(parts[0]),
    )  # fmt: skip
    optimizer.step()
