# SPDX-License-Identifier: Apache-2.0
# isoshard judge --loss sum --grad-scale 1 --mesh dp=2,tp=2 -- torchrun --nproc-per-node 4 THIS_FILE
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import loss_parallel
from torchtitan.config import JobConfig
from torchtitan.distributed import parallel_dims
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3.infra.parallelize import parallelize_llama

parallel_dims.device_type = "cpu"  # it takes CUDA for granted
dist.init_process_group("gloo")
tp, config = min(2, dist.get_world_size()), JobConfig()
dp, sizes = dist.get_world_size() // tp, {"dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 64}
config.training.seq_len, config.training.mixed_precision_param = 16, "float32"
torch.manual_seed(0)
model = Transformer(TransformerModelArgs(**sizes, max_seq_len=16, multiple_of=16))
with torch.no_grad():
    model.init_weights()
parallelize_llama(model, parallel_dims.ParallelDims(1, dp, 1, tp, 1, 1, 1, dp * tp), config)
for module in filter(lambda m: hasattr(m, "set_force_sum_reduction_for_comms"), model.modules()):
    module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in torch.randint(0, 64, (5, 8, 16), generator=torch.Generator().manual_seed(5)):
    ids = batch.chunk(dp)[dist.get_rank() // tp]
    with loss_parallel():  # summands: torchtitan divides by the tokens of all ranks
        logits = model(ids).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, ids.flatten(), reduction="sum")
        (loss / batch.numel()).backward()
    optimizer.step(), optimizer.zero_grad()
