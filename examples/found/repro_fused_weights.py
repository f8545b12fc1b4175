# SPDX-License-Identifier: Apache-2.0
# python repro_fused_weights.py [MODEL]    exit code 1: the bug is there, 0: gone, 2: failed
"""transformers 5.23.0, tp_plan: two ranks load other weights of hrm_text than one process.

Checkpoints have gqkv_proj and gate_up_proj. Each rank takes its rows of the fused tensor first, and
splits them then, so that q_proj of rank 0 has rows of another projection. llama as MODEL is right.
"""

import os
import socket
import sys
import tempfile

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig


def rank_main(rank, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    torch.distributed.init_process_group("gloo")
    sharding = DistributedConfig(tp_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=sharding)
    named = ((n, p.detach()) for n, p in model.named_parameters())
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in named}
    torch.save(whole, f"{folder}/{rank}")


if __name__ == "__main__":
    sys.excepthook = lambda *error: (sys.__excepthook__(*error), os._exit(2))
    port = str(socket.create_server(("127.0.0.1", 0)).getsockname()[1])
    os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
    config = AutoConfig.for_model((sys.argv[1:] or ["hrm_text"])[0], **sizes, **heads)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        torch.multiprocessing.spawn(rank_main, (folder,), 2)
        actual = torch.load(f"{folder}/0")
        right = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    wrong = [name for name in right if not torch.equal(actual[name], right[name])]
    for name in wrong:
        a, b = actual[name].flatten(), right[name].detach().flatten()
        worst = (a - b).abs().argmax()
        print(f"{name}: norm {a.norm():.6g}, right is {b.norm():.6g}; "
              f"factor {a @ b / (b @ b):.3g}; element {int(worst)} is {a[worst]:.6g}, "
              f"right is {b[worst]:.6g}")  # fmt: skip
    sys.exit(1 if wrong else 0)
