# SPDX-License-Identifier: Apache-2.0
# python repro_gradient_of_copies.py [MODEL]    exit code 1: the bug is there, 0: gone, 2: failed
"""transformers 5.23.0, tp_plan: apertus sums no gradient of act_fn.alpha_p over two ranks.

Each rank has the whole parameter and uses it for its own columns, so it has one summand. The
gradients of the ranks differ; their sum is right. llama as MODEL has no such parameter.
"""

import os
import socket
import sys
import tempfile

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

ALLOWED = 1e-4  # relative error; right ranks are within 1e-6


def gradients(model):
    ids = torch.randint(3, 96, (4, 8), generator=torch.Generator().manual_seed(1))
    model.train()(input_ids=ids, labels=ids).loss.backward()
    named = model.named_parameters()  # of parameters that the plan does not cut
    return {n: p.grad for n, p in named if p.grad is not None and not hasattr(p, "placements")}


def rank_main(rank, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    torch.distributed.init_process_group("gloo")
    sharding = DistributedConfig(tp_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=sharding)
    torch.save(gradients(model), f"{folder}/{rank}")


if __name__ == "__main__":
    sys.excepthook = lambda *error: (sys.__excepthook__(*error), os._exit(2))
    port = str(socket.create_server(("127.0.0.1", 0)).getsockname()[1])
    os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
    config = AutoConfig.for_model((sys.argv[1:] or ["apertus"])[0], **sizes, **heads)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        torch.multiprocessing.spawn(rank_main, (folder,), 2)
        ranks = [torch.load(f"{folder}/{rank}") for rank in range(2)]
        right = gradients(AutoModelForCausalLM.from_pretrained(folder))
    wrong = 0
    for name, *parts in ((name, ranks[0][name], ranks[1][name]) for name in ranks[0]):
        errors = [(part - right[name]).norm() / right[name].norm() for part in parts]
        if max(errors) > ALLOWED:
            wrong, norms = 1, ", ".join(f"{part.norm():.6g}" for part in parts)
            print(f"{name}: norms {norms}; sum {sum(parts).norm():.6g}; {right[name].norm():.6g} "
                  "is right")  # fmt: skip
    sys.exit(wrong)
