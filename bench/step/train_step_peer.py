# SPDX-License-Identifier: Apache-2.0
"""Peer of the training step: Hugging Face's Qwen2 in eager PyTorch, one process.

A step is forward, loss, backward and AdamW, with random weights.

Usage: python train_step_peer.py [--sizes S,M,L] [--dtypes float32,bfloat16] [--attn sdpa,eager]
                                 [--threads 1,2] [--rounds 2]

Each configuration and round is a process of its own, and rounds alternate over the configurations.
It prints one JSON line with a list of rows.

FLOPs per token = 6 N + 12 layers * heads * head_dim * seq (the full square), where N counts the
weights of matrix products, lm_head included, and not the embedding, which is looked up.
"""

import argparse, json, os, resource, statistics, subprocess, sys, time

#        hidden inter layers heads kv vocab tied batch seq warm steps
SIZES = {
    "S": (256, 704, 4, 4, 2, 2048, False, 2, 128, 5, 30),
    "M": (896, 4864, 2, 14, 2, 8192, False, 2, 256, 2, 7),
    "L": (896, 4864, 2, 14, 2, 151936, True, 2, 1024, 1, 2),
}


def gemm(torch, dtype, n=2048, reps=7):
    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    torch.mm(a, b)
    v = []
    for _ in range(reps):
        t = time.perf_counter()
        torch.mm(a, b)
        v.append(2 * n**3 / (time.perf_counter() - t) / 1e9)
    return statistics.median(v)


def worker(size, dt, attn, threads):
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.set_num_threads(threads)
    dtype = getattr(torch, dt)
    if size == "gemm":
        return print(json.dumps({"gflops": gemm(torch, dtype)}))
    h, inter, layers, heads, kv, vocab, tied, B, T, warm, steps = SIZES[size]
    cfg = Qwen2Config(
        hidden_size=h,
        intermediate_size=inter,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    m = Qwen2ForCausalLM._from_config(cfg, dtype=dtype, attn_implementation=attn).train()
    assert m.dtype == dtype and m.config._attn_implementation == attn
    opt = torch.optim.AdamW(m.parameters(), lr=1e-4)
    ids = torch.randint(0, vocab, (B, T))
    ms, losses = [], []
    for i in range(warm + steps):
        t = time.perf_counter()
        loss = m(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        if i >= warm:
            ms.append((time.perf_counter() - t) * 1e3)
        losses.append(loss.item())
    n = sum(p.numel() for p in m.parameters() if p.dim() == 2) - (0 if tied else vocab * h)
    print(
        json.dumps(
            {
                "ms": ms,
                "flop": B * T * (6 * n + 12 * layers * h * T),
                "tokens": B * T,
                "N": n,
                "loss": [losses[0], losses[-1]],
                "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            }
        )
    )


def main():
    ap = argparse.ArgumentParser()
    for k, v in (
        ("sizes", "S,M,L"),
        ("dtypes", "float32,bfloat16"),
        ("attn", "sdpa,eager"),
        ("threads", "1,2"),
    ):
        ap.add_argument("--" + k, default=v, type=lambda s: s.split(","))
    ap.add_argument("--rounds", type=int, default=2)
    ap.add_argument("--worker", nargs=4)
    a = ap.parse_args(sys.argv[1:])
    if a.worker:
        return worker(*a.worker[:3], int(a.worker[3]))
    listed = lambda x: x if isinstance(x, list) else x.split(",")
    cfgs = [("gemm", d, "-", t) for d in listed(a.dtypes) for t in listed(a.threads)]
    cfgs += [
        (s, d, at, t)
        for s in listed(a.sizes)
        for d in listed(a.dtypes)
        for at in listed(a.attn)
        for t in listed(a.threads)
    ]
    got = {}
    for _ in range(a.rounds):
        for c in cfgs:
            r = subprocess.run(
                [sys.executable, os.path.abspath(__file__), "--worker", *c],
                env=dict(os.environ, OMP_NUM_THREADS=c[3], MKL_NUM_THREADS=c[3]),
                capture_output=True,
                text=True,
            )
            if r.returncode:
                sys.exit(f"{c}: {r.stderr[-3000:]}")
            got.setdefault(c, []).append(json.loads(r.stdout.splitlines()[-1]))
            print(
                c,
                got[c][-1].get("gflops") or statistics.median(got[c][-1]["ms"]),
                file=sys.stderr,
                flush=True,
            )
    med, rows = statistics.median, []
    ceil = {(c[1], c[3]): med(x["gflops"] for x in v) for c, v in got.items() if c[0] == "gemm"}
    for c, v in got.items():
        row = dict(zip(("size", "dtype", "attn", "threads"), c))
        if c[0] == "gemm":
            row |= {"gflops": [round(x["gflops"], 1) for x in v]}
        else:
            ms = [x for y in v for x in y["ms"]]
            g = v[0]["flop"] / med(ms) / 1e6
            row |= {
                "ms": [round(f(ms), 2) for f in (med, min, max)],
                "tok_s": round(v[0]["tokens"] / med(ms) * 1e3),
                "gflops": round(g, 1),
                "of_gemm": round(g / ceil[c[1], c[3]], 3),
                "rss_gib": round(max(y["rss"] for y in v), 2),
                "loss": [round(x, 4) for x in v[0]["loss"]],
            }
        rows.append(row)
    print(json.dumps({"rounds": a.rounds, "rows": rows}))


main()
