# SPDX-License-Identifier: Apache-2.0
"""Peer of compare_bench: what PyTorch's comparisons of two equal tensors reach on one thread.

Usage: compare_peer.py [ROUNDS]     needs torch and numpy

GB/s of CPU time with both inputs counted, as compare_bench: median, minimum and maximum.
"""

import os
import statistics
import sys
import time

os.environ["OMP_NUM_THREADS"] = "1"
import torch  # noqa: E402


def measure(dtype, mib, rounds):
    count = mib * 2**20 // dtype.itemsize
    x = torch.randn(count).to(dtype)
    y = x.clone()
    ways = {
        "assert_close": lambda: torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5),
        "allclose": lambda: torch.allclose(x, y, rtol=1e-4, atol=1e-5),
        "equal": lambda: torch.equal(x, y),
        "max abs": lambda: (x.float() - y.float()).abs().max().item(),
    }
    rates = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            start = time.thread_time()
            way()
            rates[name].append(2 * mib * 2**20 / (time.thread_time() - start) / 1e9)
    for name, values in rates.items():
        values = values[1:]
        print(
            f"{str(dtype)[6:]:<9} {mib:>4} MiB  {name:<13} median {statistics.median(values):6.2f}"
            f" GB/s  min {min(values):6.2f}  max {max(values):6.2f}"
        )


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        for mib in (4, 256):
            measure(dtype, mib, rounds)


main()
