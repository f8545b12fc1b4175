#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What recording costs at a real width: Qwen2.5-0.5B's architecture in bf16, tp 2, SGD, 128 tokens.

usage: real_width.py FOLDER [--small] [--turns 3] [--perturbed 3] [--whole]

Weights are random. FOLDER gets the reference (about 3.5 GB), runs whose weights are moved by one
ulp, which are compared while they run, and the judged run. Printed are seconds, the largest memory
of a process, bytes on disk, and the verdict. ISOSHARD_JUDGE names the program that judges.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TOKENS = 128
SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "vocab_size": 4096,
}
QWEN = {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "intermediate_size": 4864,
    "vocab_size": 151936,
}
PLAN = {
    "self_attn.q_proj": "col",
    "self_attn.k_proj": "col",
    "self_attn.v_proj": "col",
    "self_attn.o_proj": "row",
    "mlp.gate_proj": "col",
    "mlp.up_proj": "col",
    "mlp.down_proj": "row",
}


def build(small: bool) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = Qwen2Config(
        **(SMALL if small else QWEN),
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rope_theta=1e6,
        use_cache=False,
    )
    return Qwen2ForCausalLM(config)


def ids_of(model: Any) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.vocab_size, (1, TOKENS), generator=generator)


def step(model: Any, optimizer: Any, ids: Any) -> tuple[float, float]:
    """Seconds, and seconds of CPU time, which other programs disturb less."""
    start, used = time.perf_counter(), time.process_time()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    seconds = time.perf_counter() - start, time.process_time() - used
    optimizer.zero_grad()
    return seconds


def sgd(model: Any) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.1)


def single(folder: Path, name: str, seed: int | None, small: bool) -> None:
    """The reference, or a perturbed run that is compared with it while it runs."""
    import isoshard

    model = build(small)
    more: dict[str, Any] = {}
    if seed is not None:
        more = {"perturb": seed, "keep": "what_differs", "reference": folder / "reference"}
    optimizer = sgd(model)
    with isoshard.record(folder / name, model, optimizer, **more):
        step(model, optimizer, ids_of(model))


def parallel(folder: Path, turns: int, small: bool, fault: bool, whole: bool) -> None:
    """Plain and recorded steps by turns, each from the same weights; a run as a whole bundle."""
    import isoshard
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = build(small)
    styles = {"col": ColwiseParallel, "row": RowwiseParallel}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, {name: styles[how]() for name, how in PLAN.items()})
    ids, optimizer = ids_of(model), sgd(model)
    saved = [p.detach().clone() for p in model.parameters()]

    def restore() -> None:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), saved, strict=True):
                parameter.copy_(value)

    def recorded(name: str, **more: Any) -> tuple[tuple[float, float], float]:
        restore()
        dist.barrier()
        start = time.perf_counter()
        with isoshard.record(folder / name, model, optimizer, mesh={"tp": 2}, **more):
            opened = time.perf_counter() - start
            if fault:
                model.model.layers[1].mlp.up_proj.weight.register_hook(lambda grad: grad * 1.5)
            seconds = step(model, optimizer, ids)
        return seconds, opened

    compare = {"keep": "what_differs", "reference": folder / "reference"}
    step(model, optimizer, ids)  # what is done once
    plain, compared, opened = [], [], []
    for _ in range(turns):
        restore()
        dist.barrier()
        plain.append(step(model, optimizer, ids))
        seconds, before = recorded("run", **compare)
        compared.append(seconds)
        opened.append(before)
    if dist.get_rank() == 0:
        for i, kind in enumerate(("s", "s of CPU time")):
            plain_, compared_ = [p[i] for p in plain], [c[i] for c in compared]
            ratio = statistics.median(c / p for c, p in zip(compared_, plain_, strict=True))
            print(f"plain steps      {words(plain_)} {kind}")
            print(f"recorded steps   {words(compared_)} {kind}, {ratio:.2f} x (median)")
        print(f"before them      {words(opened)} s to open the reference and compare the weights")
    if whole:
        seconds, _ = recorded("whole")
        if dist.get_rank() == 0:
            print(f"a whole bundle   {words(list(seconds))} s for its step, and of CPU time")
    memory("rank")
    dist.destroy_process_group()


def words(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def memory(what: str) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    print(f"memory           {used:.1f} GiB at most in a process ({what})", flush=True)


def bytes_of_tensors(run: Path) -> int:
    """What the tensors of a run are together, kept or not."""
    sizes = {"fp64": 8, "fp32": 4, "bf16": 2, "int64": 8}
    return sum(
        math.prod(record["local_shape"]) * sizes[record["dtype"]]
        for path in run.glob("step*/rank*.json")
        for record in json.loads(path.read_text())["records"]
    )


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true", help="a model of 2 small layers")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--fault", action="store_true", help="one gradient of the run is wrong")
    parser.add_argument("--perturbed", type=int, default=3, help="runs with moved weights")
    parser.add_argument("--whole", action="store_true", help="record a whole bundle, too")
    parser.add_argument("--part", help="for this script's own processes")
    options = parser.parse_args()
    folder: Path = options.folder
    if options.part == "parallel":
        parallel(folder, options.turns, options.small, options.fault, options.whole)
        return
    if options.part is not None:
        seed = None if options.part == "reference" else int(options.part[-1])
        single(folder, options.part, seed, options.small)
        memory(options.part)
        return

    folder.mkdir(parents=True, exist_ok=True)
    judge = os.environ.get("ISOSHARD_JUDGE", "isoshard-judge")
    flags = ["--small"] * options.small + ["--fault"] * options.fault
    flags += ["--whole"] * options.whole
    own = [str(Path(__file__).resolve()), str(folder), *flags, "--turns", str(options.turns)]
    perturbed = [f"perturbed{i + 1}" for i in range(options.perturbed)]
    for part in ["reference", *perturbed]:
        timed(part, [sys.executable, *own, "--part", part])
    timed("respond", [judge, "respond", *(str(folder / p) for p in ["reference", *perturbed])])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    timed("tp 2", [*torchrun, *own, "--part", "parallel"])
    names = ["run", "whole"] if options.whole else ["run"]
    for name in ("reference", "perturbed1", *names):
        print(f"bytes            {bytes_of(folder / name):>13,} {name}")
    tensors = bytes_of_tensors(folder / "run")
    print(f"bytes            {tensors:>13,} tensors of the run, which a whole bundle holds")
    print(f"a run's share    {100 * bytes_of(folder / 'run') / tensors:.2f} %", flush=True)
    for name in names:
        command = [judge, "compare", str(folder / "reference"), str(folder / name)]
        timed(f"compare {name}", [*command, "--mesh", "tp=2"], check=False)
    if options.whole:
        shutil.rmtree(folder / "whole")


def timed(what: str, command: list[str], *, check: bool = True) -> None:
    start = time.perf_counter()
    subprocess.run(command, check=check)
    print(f"{what:<16} {time.perf_counter() - start:.1f} s as a process", flush=True)


if __name__ == "__main__":
    main()
