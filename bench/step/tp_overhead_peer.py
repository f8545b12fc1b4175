# SPDX-License-Identifier: Apache-2.0
"""Peer of tensor parallelism's overhead: forward and backward of a Qwen2 with DTensor.

The model has hidden 256, 4 layers, batch 2 x 128, fp32. Compared are tp 2 on gloo (2 ranks x
1 thread) and the plain model on one rank (1 and 2 threads), and the CPU time of one eager DTensor
operation is measured.

Usage: python tp_overhead_peer.py [--rounds 5] [--steps 30]

It starts torchrun itself and prints one JSON line.
"""

import argparse, json, os, statistics, subprocess, sys, time


def op_us(f, n=2000):
    for _ in range(50):
        f()
    t = time.process_time()
    for _ in range(n):
        f()
    return (time.process_time() - t) / n * 1e6


def worker(a):
    import torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from transformers import Qwen2Config, Qwen2ForCausalLM

    world = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    m = Qwen2ForCausalLM._from_config(
        Qwen2Config(
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=2048,
        ),
        dtype=torch.float32,
        attn_implementation="sdpa",
    )
    out = {}
    if world > 1:
        dist.init_process_group("gloo")
        mesh, plan = init_device_mesh("cpu", (world,)), {}
        for i in range(4):
            p = f"model.layers.{i}."
            plan |= {
                p + k: ColwiseParallel()
                for k in (
                    "self_attn.q_proj",
                    "self_attn.k_proj",
                    "self_attn.v_proj",
                    "mlp.gate_proj",
                    "mlp.up_proj",
                )
            }
            plan |= {p + k: RowwiseParallel() for k in ("self_attn.o_proj", "mlp.down_proj")}
        if a.head:
            plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(m, mesh, plan)
    ids = torch.randint(0, 2048, (2, 128), generator=torch.Generator().manual_seed(1))
    ms, c0 = [], 0
    for i in range(5 + a.steps):
        if i == 5:
            c0 = time.process_time()
        t = time.perf_counter()
        loss = m(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        if i >= 5:
            ms.append((time.perf_counter() - t) * 1e3)
        m.zero_grad(set_to_none=True)
    cpu = torch.tensor([(time.process_time() - c0) / a.steps * 1e3])
    if world > 1:
        dist.all_reduce(cpu)
        x, w = torch.ones(8, 8), torch.ones(8, 8)
        dx, dw = distribute_tensor(x, mesh, [Replicate()]), distribute_tensor(w, mesh, [Shard(0)])
        loc = dw.to_local()
        with torch.no_grad():
            out["op_us"] = {
                k: round(op_us(f), 2)
                for k, f in {
                    "plain_add": lambda: x + x,
                    "dtensor_add": lambda: dx + dx,
                    "plain_linear": lambda: torch.nn.functional.linear(x, loc),
                    "dtensor_linear": lambda: torch.nn.functional.linear(dx, dw),
                    "from_local_to_local": lambda: DTensor.from_local(
                        x, mesh, [Replicate()], run_check=False
                    ).to_local(),
                }.items()
            }
    out |= {"ms": statistics.median(ms), "cpu_ms": cpu.item(), "loss": loss.item()}
    if os.environ.get("RANK", "0") == "0":
        print("PEER " + json.dumps(out), flush=True)
    if world > 1:
        dist.destroy_process_group()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--head", action="store_true", help="also shard lm_head over the vocabulary")
    ap.add_argument("--worker", action="store_true")
    a = ap.parse_args()
    if a.worker:
        return worker(a)
    here, got = [os.path.abspath(__file__), "--worker", "--steps", str(a.steps)], {}
    run = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *here,
    ]
    cfgs = {
        "one_rank_1t": ([sys.executable, *here], "1", "1"),
        "one_rank_2t": ([sys.executable, *here], "2", "1"),
        "tp2": (run, "1", "2"),
        "tp2_head": (run + ["--head"], "1", "2"),
    }
    for _ in range(a.rounds):
        for k, (cmd, threads, world) in cfgs.items():
            env = dict(os.environ, OMP_NUM_THREADS=threads) | (
                {"WORLD_SIZE": "1"} if world == "1" else {}
            )
            r = subprocess.run(cmd, env=env, capture_output=True, text=True)
            if r.returncode:
                sys.exit(f"{k}: {r.stderr[-3000:]}")
            got.setdefault(k, []).append(
                json.loads([x for x in r.stdout.splitlines() if x.startswith("PEER ")][0][5:])
            )
            print(k, got[k][-1], file=sys.stderr, flush=True)
    med, out = statistics.median, {"rounds": a.rounds, "steps": a.steps}
    for k, v in got.items():
        out[k] = {
            f: [round(g(x[f] for x in v), 2) for g in (med, min, max)] for f in ("ms", "cpu_ms")
        } | {"loss": v[0]["loss"]}
    one, two = out["one_rank_1t"], out["one_rank_2t"]
    for k in ("tp2", "tp2_head"):
        out[k] |= {
            "wall_vs_1t": round(out[k]["ms"][0] / one["ms"][0], 3),
            "wall_vs_2t": round(out[k]["ms"][0] / two["ms"][0], 3),
            "wall_vs_ideal": round(2 * out[k]["ms"][0] / one["ms"][0], 3),
            "cpu_vs_1t": round(out[k]["cpu_ms"][0] / one["cpu_ms"][0], 3),
        }
    out["op_cpu_us"] = {
        k: round(med(x["op_us"][k] for x in got["tp2"]), 2) for k in got["tp2"][0]["op_us"]
    }
    print(json.dumps(out))


main()
