# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: positions cut over cp, in order or balanced (head and tail)."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from live_models import Check, adamw, conforms, ids_of, loss_of
from test_judge import EXAMPLES, judge, planted
from torch import nn

from isoshard import Divergence
from isoshard._mesh import Mesh
from isoshard._samples import _joined, _samples_of

pytestmark = pytest.mark.usefixtures("judge_program")
IDS = ids_of(8, 12)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.order = [torch.arange(12)]
        self.rank = 0
        self.gather: Callable[[torch.Tensor], torch.Tensor] = lambda x: x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        k, v = self.gather(k), self.gather(v)
        mask = self.order[self.rank][:, None] >= torch.cat(self.order)[: k.shape[2]]
        o = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(o.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.layers = nn.ModuleList([Attention(), Attention()])
        self.mine = torch.arange(12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        ids = ids[:, self.mine]
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return loss_of(self.head(x), ids)


def order_of(degree: int, is_balanced: bool) -> list[torch.Tensor]:
    if not is_balanced:
        return list(torch.arange(12).chunk(degree))
    parts = torch.arange(12).chunk(2 * degree)
    return [torch.cat([parts[r], parts[2 * degree - 1 - r]]) for r in range(degree)]


def context_parallel(model: Any, mesh: Any, is_balanced: bool = True, fault: str = "") -> nn.Module:
    from torch.distributed._functional_collectives import all_gather_tensor_autograd

    def gather(x: torch.Tensor) -> torch.Tensor:
        whole = all_gather_tensor_autograd(x.contiguous(), gather_dim=2, group=mesh["cp"])
        return whole.wait() if hasattr(whole, "wait") else whole

    cp, rank = mesh["cp"].size(), mesh["cp"].get_local_rank()
    order = order_of(cp, is_balanced)
    model.mine = order[rank]
    for layer in model.layers:
        layer.order, layer.rank = order, rank
        layer.gather = gather
    last = model.layers[1]
    if fault == "keys in another order":
        last.order = order_of(cp, not is_balanced)
    if fault == "own keys only":
        last.gather, last.order, last.rank = lambda x: x, [order[rank]], 0
    if fault == "gradients of keys not sent back":
        last.gather = lambda x: gather(x.detach())
    if fault == "the same part":
        model.mine = order[0]
    if fault == "gradients apart":
        return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    return nn.parallel.DistributedDataParallel(model)


@pytest.mark.live
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("is_balanced", [True, False])
@pytest.mark.parametrize("mesh", ["cp=2", "dp=2,cp=2", "cp=3"])
def test_context_parallelism_conforms(
    isoshard_check: Check, mesh: str, is_balanced: bool, micro_batches: int
) -> None:
    parallelize = functools.partial(context_parallel, is_balanced=is_balanced)
    options = {"mesh": mesh, "batch": IDS, "optimizer": adamw, "micro_batches": micro_batches}
    conforms(isoshard_check, Model, parallelize, steps=2, **options)


@pytest.mark.live
@pytest.mark.parametrize("is_balanced", [True, False])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("keys in another order", "first forward at layers.1.out"),
        ("own keys only", "first forward at layers.1.out"),
        ("gradients of keys not sent back", "first gradient at layers.1.qkv"),
        ("the same part", "first loss|first forward at embed"),
        ("gradients apart", "rank-local over cp"),
    ],
)
def test_broken_context_parallelism_is_found(
    isoshard_check: Check, fault: str, words: str, is_balanced: bool
) -> None:
    parallelize = functools.partial(context_parallel, fault=fault, is_balanced=is_balanced)
    with pytest.raises(Divergence, match=words):
        isoshard_check(Model, parallelize, mesh="dp=2,cp=2", batch=IDS, optimizer=adamw)


@pytest.mark.live
def test_a_script_whose_inputs_are_balanced_conforms() -> None:
    options = ("--mesh", "dp=2,cp=2")
    code, text = judge(EXAMPLES / "context_parallel.py", 4, options=options)
    assert code == 0, text


@pytest.mark.live
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("order[rank]]\n", "order[0]]\n", "first data ids input_ids (step 0)"),
        ("< torch.cat(order)", "< torch.arange(12)", "first forward at 1 (step 0)"),
    ],
    ids=["same part", "keys in another order"],
)
def test_a_planted_bug_of_context_parallelism_is_found(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    script = planted("context_parallel.py", old, new, tmp_path)
    code, text = judge(script, 4, options=("--mesh", "dp=2,cp=2"))
    assert code == 1, text
    assert words in text


@pytest.mark.live
@pytest.mark.parametrize("words", [(), ("--contiguous",)], ids=["head and tail", "in order"])
@pytest.mark.parametrize("mesh", ["cp=2", "dp=2,cp=2"])
def test_torchs_ring_on_the_kernel_of_a_cpu_conforms(mesh: str, words: tuple[str, ...]) -> None:
    ranks = 4 if "dp" in mesh else 2
    code, text = judge(EXAMPLES / "ring_attention.py", ranks, *words, options=("--mesh", mesh))
    assert code == 0, text


@pytest.mark.live
@pytest.mark.parametrize("words", [(), ("--contiguous",)], ids=["head and tail", "in order"])
@pytest.mark.parametrize(
    ("old", "new", "first"),
    [
        (
            "        functional.cross",
            "        _cp_options.enable_load_balance ^= cp > 1\n        functional.cross",
            "first: forward at 1.out (step 0)",
        ),
        ("(q, k, v, is", "(q, k.detach() if cp > 1 else k, v, is", "first: gradient at 2.qkv"),
    ],
    ids=["masked as in the other order", "no gradients of keys"],
)
def test_a_planted_bug_of_torchs_ring_is_found(
    tmp_path: Path, old: str, new: str, first: str, words: tuple[str, ...]
) -> None:
    shutil.copy(EXAMPLES / "ring_on_cpu.py", tmp_path)
    script = planted("ring_attention.py", old, new, tmp_path)
    code, text = judge(script, 2, *words, options=("--mesh", "cp=2"))
    assert code == 1, text
    assert first in text


SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
torch.manual_seed(0)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return ATTENTION(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


model = nn.Sequential(nn.Embedding(50, 16), Attention(), nn.Linear(16, 50))
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for ids in torch.randint(0, 50, (3, 4, 12), generator=torch.Generator().manual_seed(5)):
    if mesh.size() == 1:
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    else:
        with context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]):
            F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.live
@pytest.mark.parametrize(
    ("attention", "code", "words"),
    [
        ("F.scaled_dot_product_attention", 4, "_flash_attention_for_cpu.default does not have a"),
        ("scaled_dot_product_attention", 1, "first forward at 1 (step 0)"),
    ],
    ids=["as documented", "imported by name, so not replaced"],
)
def test_torchs_context_parallel_on_a_cpu_gets_no_false_verdict(
    tmp_path: Path, attention: str, code: int, words: str
) -> None:
    script = tmp_path / "ring.py"
    script.write_text(SCRIPT.replace("ATTENTION", attention))
    got, text = judge(script, 2, options=("--mesh", "cp=2"))
    assert got == code, text
    assert words in text


@pytest.mark.parametrize("is_balanced", [True, False])
def test_samples_are_found_by_all_positions_together(is_balanced: bool) -> None:
    mesh = Mesh({"dp": 2, "cp": 2})
    wanted = {"input_ids": IDS}
    order = order_of(2, is_balanced)
    inputs = [
        {"input_ids": IDS[dp::2][:, order[cp]], "mask": torch.ones(4, 12)}
        for dp in range(2)
        for cp in range(2)
    ]

    whole = [_joined(inputs, rank, wanted, mesh, is_balanced) for rank in range(4)]
    wrong = [_joined(inputs, rank, wanted, mesh, not is_balanced) for rank in range(4)]

    ids = [{"input_ids": part["input_ids"]} for part in whole]
    assert _samples_of(wanted, ids, mesh) == [[0, 2, 4, 6]] * 2 + [[1, 3, 5, 7]] * 2
    ids = [{"input_ids": part["input_ids"]} for part in wrong]
    assert _samples_of(wanted, ids, mesh) is None
    assert all(torch.equal(part["mask"], torch.ones(4, 12)) for part in whole)
