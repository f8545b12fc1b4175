# SPDX-License-Identifier: Apache-2.0
# python repro_tied_head.py [VOCABULARY]    exit code 1: the bug is there, 0: gone, 2: failed
"""transformers 5.23.0, fsdp_size=2: after a step a tied head that is cut unevenly reads old rows.

The parameters after the step are right; the next logits are not. A vocabulary of 96, which two
ranks divide, is right.
"""

import os
import socket
import sys
import tempfile

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

ALLOWED = 1e-5  # relative error of the logits; right ranks are within 1e-6


def logits_after_a_step(model):
    ids = torch.randint(3, 96, (4, 8), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.5)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return model(input_ids=ids).logits.detach().double()


def rank_main(rank, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    torch.distributed.init_process_group("gloo")
    sharding = DistributedConfig(fsdp_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=sharding)
    torch.save(logits_after_a_step(model), f"{folder}/{rank}")


if __name__ == "__main__":
    sys.excepthook = lambda *error: (sys.__excepthook__(*error), os._exit(2))
    port = str(socket.create_server(("127.0.0.1", 0)).getsockname()[1])
    os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
    rest = {"vocab_size": int((sys.argv[1:] or ["97"])[0]), "tie_word_embeddings": True}
    config = AutoConfig.for_model("llama", **sizes, **heads, **rest)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        torch.multiprocessing.spawn(rank_main, (folder,), 2)
        actual = torch.load(f"{folder}/0")
        right = logits_after_a_step(AutoModelForCausalLM.from_pretrained(folder))
    off = (actual - right).abs()
    factor = (actual * right).sum() / right.square().sum()
    columns = (off.amax((0, 1)) > 1e-4).nonzero().flatten().tolist()
    print(f"norm {actual.norm():.6g}, right is {right.norm():.6g}; factor {factor:.6g}; largest "
          f"difference {off.max():.3g}; wrong columns {columns[:1]} to {columns[-1:]}")  # fmt: skip
    sys.exit(0 if off.norm() <= ALLOWED * right.norm() else 1)
