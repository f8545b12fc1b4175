#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures and models what grows with the ranks of an attached world (docs/reference/cluster.md).

    attached_growth.py BUILD_FOLDER [RANKS...]     default 2 4 8 16 32 48 64

Runs `verify --preset small --attach --subjects ddp --dp N --dtype fp32` under mpirun for each
number of ranks, with a program around each process that writes its largest resident set and CPU
time. Then fits, by least squares over all runs, and prints with what the fit leaves over:

    memory of process 0   base + record * N + journal(N)      from the size on at which records
                                                              outgrow the reference
    memory of the others  the same with a base and a record of their own
    CPU time of all       start * N + message * N * N

journal(N) is not fitted: it is the size of two journals of N lanes (src/core/comm/journal.cc).
"""
import math
import os
import resource
import subprocess
import sys
import tempfile
import time

MODELLED = (128, 256, 512, 1024)
LARGE = 16  # from so many ranks on records outgrow the reference


def inside(folder, command):
    """Around one process: its exit code, and its usage in a file."""
    code = subprocess.call(command)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    rank = os.environ["OMPI_COMM_WORLD_RANK"]
    with open(os.path.join(folder, rank), "w") as file:
        file.write(f"{usage.ru_maxrss / 1024} {usage.ru_utime + usage.ru_stime}")
    return code


def run(build, ranks):
    with tempfile.TemporaryDirectory() as folder:
        launch = ["mpirun", "--oversubscribe", "--bind-to", "none"]
        launch += ["--mca", "mpi_yield_when_idle", "1"]
        if os.getuid() == 0:
            launch.append("--allow-run-as-root")
        command = launch + ["-n", str(ranks), sys.executable, os.path.abspath(__file__)]
        command += ["--inside", folder, os.path.join(build, "bin", "isoshard")]
        command += ["verify", "--attach", "--preset", "small", "--subjects", "ddp"]
        command += ["--dp", str(ranks), "--dtype", "fp32"]
        start = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - start
        usages = []
        for rank in range(ranks):
            with open(os.path.join(folder, str(rank))) as file:
                usages.append(tuple(float(word) for word in file.read().split()))
    others = [memory for memory, _ in usages[1:]]
    return {"ranks": ranks, "first": usages[0][0], "others": max(others),
            "cpu": sum(cpu for _, cpu in usages), "seconds": seconds}


def journal_mib(ranks):
    """Two journals of a process: lanes of 10.4 KiB, and 64 calls of 6 words and a bit a rank."""
    lane = 10.4 * 1024 + 64 * 8 * (6 + math.ceil(ranks / 64))
    return 2 * ranks * lane / 2**20


def least_squares(rows, values):
    """Of two unknowns: the normal equations."""
    a = sum(x * x for x, _ in rows)
    b = sum(x * y for x, y in rows)
    c = sum(y * y for _, y in rows)
    p = sum(x * v for (x, _), v in zip(rows, values))
    q = sum(y * v for (_, y), v in zip(rows, values))
    det = a * c - b * b
    return (p * c - q * b) / det, (a * q - b * p) / det


def fit(title, rows, values, ranks, describe, at):
    if len(rows) < 3:
        print(f"\n{title}: a fit needs at least 3 sizes from {LARGE} ranks on, got {len(rows)}")
        return
    first, second = least_squares(rows, values)
    print(f"\n{title}: {describe(first, second)}")
    for (x, y), value, n in zip(rows, values, ranks):
        model = first * x + second * y
        print(f"  {n:5d} ranks: measured less model {value - model:+8.1f} of {value:8.1f}")
    for n in MODELLED:
        print(f"  {n:5d} ranks: model {at(first, second, n):8.0f}")


def main():
    if sys.argv[1] == "--inside":
        sys.exit(inside(sys.argv[2], sys.argv[3:]))
    build = sys.argv[1]
    sizes = [int(text) for text in sys.argv[2:]] or [2, 4, 8, 16, 32, 48, 64]
    results = []
    for ranks in sizes:
        results.append(run(build, ranks))
        print("{ranks:4d} ranks: process 0 {first:6.0f} MiB, largest other {others:6.0f} MiB, "
              "CPU {cpu:6.1f} s, {seconds:5.1f} s".format(**results[-1]), flush=True)
    large = [result for result in results if result["ranks"] >= LARGE]
    ranks = [result["ranks"] for result in large]
    titles = {"first": "memory of process 0, MiB", "others": "memory of another, MiB"}
    for name, title in titles.items():
        values = [result[name] - journal_mib(result["ranks"]) for result in large]
        fit(title, [(1, n) for n in ranks], values, ranks,
            lambda base, record: f"{base:.0f} + {record:.2f} N + journal(N)",
            lambda base, record, n: base + record * n + journal_mib(n))
    ranks = [result["ranks"] for result in results]
    fit("CPU time of all, s", [(n, n * n) for n in ranks], [r["cpu"] for r in results], ranks,
        lambda start, message: f"{start:.3f} N + {message:.5f} N^2",
        lambda start, message, n: start * n + message * n * n)


main()
