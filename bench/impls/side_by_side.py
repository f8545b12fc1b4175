#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every implementation of `isoshard bench` against live PyTorch and DeepSpeed, in one run.

usage: side_by_side.py [--isoshard PROGRAM] [--python PYTHON] [--sizes S,M]
                       [--dtypes float32,bfloat16] [--rounds 3] [--only NAME,...]
                       [--timeout SECONDS] [--quick] [--output FILE.json]

PYTHON has the pinned wheels of python/live-requirements.txt (`./isoshard test -L live` makes such
an environment). Each row runs ours and its peer in turns, in changing order, each in fresh
processes, with the same model, ranks, threads (one a rank), tokens, optimizer and clipping. A
figure is the median step of a run, the median of the rounds. It prints a table in Markdown: ms of
both, their ratio (below 1: ours takes less time), and the least and largest ratio of the rounds.

--quick takes a tiny model and few steps: it shows that everything runs, and no speed.
Exit code: 0 if every row ran, 1 if one did not: the table says which of the two programs failed, on
which rank and why.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent

#        hidden ffn layers heads kv vocabulary batch sequence warm-up steps
SIZES = {
    "quick": (64, 128, 2, 4, 2, 256, 2, 16, 1, 3),
    "S": (256, 704, 4, 4, 2, 2048, 2, 128, 5, 30),
    "M": (896, 4864, 2, 14, 2, 8192, 2, 256, 2, 7),
}

# name: (flags of ours, peer, its title, ranks, whether ranks have samples of their own,
#        micro-batches)
ROWS = {
    "reference": ("--impl reference", "eager", "PyTorch, one process", 1, False, 1),
    "ddp dp 2": ("--impl ddp --dp 2", "ddp", "DDP", 2, True, 1),
    "fsdp_dtensor dp 2": ("--impl fsdp_dtensor --dp 2", "fsdp2", "FSDP2", 2, True, 1),
    "fsdp_dtensor tp 2": ("--impl fsdp_dtensor --tp 2", "dtensor_tp", "DTensor TP", 2, False, 1),
    "autotp tp 2": (
        "--impl autotp --tp 2 --zero-stage 0 --no_vocab_parallel",
        "deepspeed_autotp",
        "DeepSpeed AutoTP",
        2,
        False,
        1,
    ),
    "autotp dp 2 ZeRO 1": (
        "--impl autotp --dp 2 --zero-stage 1 --no_vocab_parallel",
        "deepspeed_zero1",
        "DeepSpeed ZeRO 1",
        2,
        True,
        1,
    ),
    "autotp dp 2 ZeRO 2": (
        "--impl autotp --dp 2 --zero-stage 2 --no_vocab_parallel",
        "deepspeed_zero2",
        "DeepSpeed ZeRO 2",
        2,
        True,
        1,
    ),
    "megatron tp 2": ("--impl megatron --tp 2", "dtensor_tp", "DTensor TP", 2, False, 1),
    "nd dp 2": ("--impl nd --dp 2", "fsdp2", "FSDP2", 2, True, 1),
    "nd tp 2": ("--impl nd --tp 2", "dtensor_tp", "DTensor TP", 2, False, 1),
    "nd pp 2 1F1B": (
        "--impl nd --pp 2 --gradient_accumulation_steps 4",
        "pipeline",
        "pipelining 1F1B",
        2,
        False,
        4,
    ),
}


class Failed(Exception):
    """Why a run did not end."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(**more: str) -> dict[str, str]:
    """One thread for each rank, and DeepSpeed on the CPU."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return dict(os.environ, **dict.fromkeys(names, "1"), DS_ACCELERATOR="cpu", **more)


def config_of(size: str) -> dict:
    hidden, ffn, layers, heads, kv, vocabulary = SIZES[size][:6]
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
    }


def ended(program: str, processes: list, limit: float) -> list:
    """What each process wrote. The first that fails is named, and then none is left running."""
    with concurrent.futures.ThreadPoolExecutor(len(processes)) as threads:
        waiting = {threads.submit(p.communicate): rank for rank, p in enumerate(processes)}
        try:
            for done in concurrent.futures.as_completed(waiting, timeout=limit):
                code = processes[waiting[done]].returncode
                if code != 0:
                    out, error = done.result()
                    said = (error or out).strip()[-1500:]
                    rank = waiting[done]
                    raise Failed(f"{program}, rank {rank}, exit code {code}: {said}")
        except concurrent.futures.TimeoutError:
            problem = f"{program} must end within {limit:g} s (--timeout), and did not"
            raise Failed(problem) from None
        finally:
            for process in processes:
                process.kill()
        return [done.result() for done in waiting]


def time_ours(options, size: str, dtype: str, row: tuple, folder: pathlib.Path) -> float:
    flags, _, _, ranks, splits_batch, _ = row
    batch, sequence, warmup, steps = SIZES[size][6:]
    config = folder / f"{size}.json"
    config.write_text(json.dumps(config_of(size)), encoding="utf-8")
    out = folder / "ours"
    command = [options.isoshard, "bench", *flags.split(), "--model", str(config), "--dtype", dtype]
    command += ["--batch_size", str(max(1, batch // ranks if splits_batch else batch))]
    command += ["--seq_length", str(sequence), "--warmup_steps", str(warmup)]
    command += ["--num_training_steps", str(warmup + steps), "--threads", "1"]
    command += ["--log_interval", "0", "--output_dir", str(out)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ours = subprocess.Popen(command, env=environment(), **pipes)
    ended("isoshard bench", [ours], options.timeout)
    (results,) = out.glob("results_*.json")
    median = json.loads(results.read_text(encoding="utf-8"))["summary"]["p50_step_time_ms"]
    results.unlink()
    return median


def time_peer(options, size: str, dtype: str, row: tuple) -> float:
    _, peer, _, ranks, splits_batch, micro_batches = row
    batch, sequence, warmup, steps = SIZES[size][6:]
    spec = {
        "peer": peer,
        "config": config_of(size),
        "dtype": dtype,
        "batch_size": max(1, batch // ranks if splits_batch else batch),
        "micro_batches": micro_batches,
        "sequence": sequence,
        "warmup": warmup,
        "steps": steps,
        "threads": 1,
        "splits_batch": splits_batch,
    }
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [options.python, str(HERE / "peers.py"), json.dumps(spec)],
            env=environment(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(ranks),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    ends = ended(f"the peer, {peer}", processes, options.timeout)
    line = next(line for line in ends[0][0].splitlines() if line.startswith('{"ms"'))
    return json.loads(line)["ms"]


def versions(python: str) -> dict[str, str]:
    script = (
        "import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in "
        "('torch', 'transformers', 'deepspeed')}))"
    )
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(
            f"--python must have torch, transformers and deepspeed of python/live-requirements.txt,"
            f" got {python}:\n{done.stderr[-600:]}"
        )
    return json.loads(done.stdout)


def measure(options: argparse.Namespace, size: str, dtype: str, folder: pathlib.Path) -> list:
    rows = []
    for name, row in ROWS.items():
        if options.only and name not in options.only:
            continue
        ours, peers, problem = [], [], ""
        for number in range(options.rounds):
            sides = [
                (ours, lambda: time_ours(options, size, dtype, row, folder)),
                (peers, lambda: time_peer(options, size, dtype, row)),
            ]
            try:
                for times, run in sides if number % 2 == 0 else reversed(sides):
                    times.append(run())
            except Failed as error:
                problem = str(error)
                break
            print(f"{size} {dtype} {name}: {ours[-1]:.1f} / {peers[-1]:.1f} ms", file=sys.stderr)
        if problem:
            print(f"{size} {dtype} {name}: {problem}", file=sys.stderr)
        rows.append({"name": name, "peer": row[2], "ours_ms": ours, "peer_ms": peers})
        rows[-1] |= {"size": size, "dtype": dtype, "problem": problem}
    return rows


def table_of(rows: list) -> str:
    text = "| size | dtype | ours | ms | peer | ms | ours / peer | least - largest |\n"
    text += "|---|---|---|---|---|---|---|---|\n"
    for row in rows:
        head = f"| {row['size']} | {row['dtype']} | {row['name']} |"
        if row["problem"]:
            reason = row["problem"].splitlines()[-1][:120]
            text += f"{head} - | {row['peer']} | - | not measured: {reason} | |\n"
            continue
        ours, peer = statistics.median(row["ours_ms"]), statistics.median(row["peer_ms"])
        ratios = [a / b for a, b in zip(row["ours_ms"], row["peer_ms"])]
        text += f"{head} {ours:.1f} | {row['peer']} | {peer:.1f} | {ours / peer:.2f} |"
        text += f" {min(ratios):.2f} - {max(ratios):.2f} |\n"
    return text


def main() -> int:
    listed = lambda text: text.split(",")  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isoshard", default=str(HERE.parents[1] / "build/bin/isoshard"))
    parser.add_argument("--python", default=os.environ.get("ISOSHARD_PYTHON", sys.executable))
    parser.add_argument("--sizes", default=["S", "M"], type=listed)
    parser.add_argument("--dtypes", default=["float32"], type=listed)
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("--only", default=[], type=listed, help=", ".join(ROWS))
    parser.add_argument("--timeout", default=1800.0, type=float, help="seconds for one run")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output")
    options = parser.parse_args()
    for name in options.only:
        if name not in ROWS:
            parser.error(f"--only must name rows of {', '.join(ROWS)}; got {name}")
    if options.quick:
        options.sizes, options.rounds = ["quick"], 1
    pins = versions(options.python)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size in options.sizes:
            for dtype in options.dtypes:
                rows += measure(options, size, dtype, pathlib.Path(folder))
    print(", ".join(f"{name} {version}" for name, version in pins.items()))
    print(table_of(rows), end="")
    if options.output:
        pathlib.Path(options.output).write_text(
            json.dumps({"versions": pins, "rounds": options.rounds, "rows": rows}, indent=1) + "\n",
            encoding="utf-8",
        )
    return 1 if any(row["problem"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
