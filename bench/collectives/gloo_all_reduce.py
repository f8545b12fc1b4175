# SPDX-License-Identifier: Apache-2.0
"""Peer of bench_all_reduce: PyTorch's all_reduce on gloo, in the same sizes, timed the same way.

Usage: gloo_all_reduce.py [RANKS...]     needs torch and numpy; default 2 4
"""

import os
import subprocess
import sys
import time


def worker():
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        for kib in (1, 16, 64, 256, 1024, 4096, 16384, 65536):
            data = torch.zeros(kib * 1024 // dtype.itemsize, dtype=dtype)
            times_ms = []
            for repetition in range(-3, max(9, min(400, 65536 // kib))):
                dist.barrier()
                start = time.perf_counter()
                dist.all_reduce(data)
                if repetition >= 0:
                    times_ms.append((time.perf_counter() - start) * 1e3)
            times_ms.sort()
            if dist.get_rank() == 0:
                print(
                    f"gloo    {dist.get_world_size()} ranks {name} {kib:>6} KiB"
                    f"  median {times_ms[len(times_ms) // 2]:>8.4f} ms"
                    f"  best {times_ms[0]:>8.4f} ms",
                    flush=True,
                )
    dist.destroy_process_group()


def main():
    if "LOCAL_RANK" in os.environ:
        return worker()
    for ranks in sys.argv[1:] or ("2", "4"):
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            ranks,
            os.path.abspath(__file__),
        ]
        subprocess.run(launch, env=dict(os.environ, OMP_NUM_THREADS="1"), check=True)


main()
