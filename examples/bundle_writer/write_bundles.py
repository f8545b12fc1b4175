# SPDX-License-Identifier: Apache-2.0
"""Writes bundles as docs/reference/bundle.md says, with nothing but Python's standard library.

    python3 write_bundles.py runs
    isoshard-judge respond runs/reference runs/perturbed1 runs/perturbed2 runs/perturbed3
    isoshard-judge compare runs/reference runs/right         # conforms
    isoshard-judge compare runs/reference runs/faulty_sum    # scale 2 = dp

A linear model, out = x w, takes two steps of SGD: in one process (the reference), and on two ranks.
"""

import hashlib
import json
import math
import random
import struct
import sys
from pathlib import Path

SAMPLES, INPUTS, OUTPUTS, STEPS, RATE = 8, 5, 3, 2, 0.125
TRAINING = {"dtype": "fp64", "optimizer": {"kind": "sgd", "learning_rate": RATE}}
JUDGING = {"activation_grad_scale": "dp", "partial": ["scalar/loss"]}


def write_rank(folder, rank, step, records):
    """The three files of a rank and step. A record is kind, name, rows of numbers, and fields."""
    header, content, entries = {}, b"", []
    for kind, name, rows, fields in records:
        dtype, letter = ("I64", "q") if kind == "data_id" else ("F64", "d")
        begin, shape = len(content), [len(rows), len(rows[0])]
        content += struct.pack(f"<{len(rows) * len(rows[0])}{letter}", *sum(map(list, rows), []))
        place = {"dtype": dtype, "shape": shape, "data_offsets": [begin, len(content)]}
        header[f"{kind}/{name}/{fields.get('call', 0)}"] = place
        entries.append({"kind": kind, "name": name, "global_shape": shape, **fields})
    stem = folder / f"step{step:04d}" / f"rank{rank:05d}"
    stem.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(header).encode()
    stem.with_suffix(".safetensors").write_bytes(struct.pack("<Q", len(text)) + text + content)
    file = {"schema": 2, "run": folder.name, "rank": rank, "step": step, "records": entries}
    stem.with_suffix(".json").write_text(json.dumps(file))
    stem.with_suffix(".done").write_text(folder.name + "\n")


def seal(folder, ranks):
    """Writes manifest.json, with the hash of every other file."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}
    manifest = {"schema": 2, "run": folder.name, "producer": {"name": "example", "version": "1"}}
    manifest |= {"subject": "linear", "case": "two_steps", "steps": list(range(STEPS))}
    manifest |= {"mesh": [{"axis": "dp", "degree": ranks}], "files": files}
    manifest |= {"settings": {"training": TRAINING, "judging": JUDGING}}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


def product(a, b):
    return [[math.fsum(p * q for p, q in zip(row, column)) for column in zip(*b)] for row in a]


def plus(a, factor, b):
    return [[v + factor * d for v, d in zip(*rows)] for rows in zip(a, b)]


def write_run(folder, ranks=1, seed=None, gradient_scale=None):
    """A whole run; `seed` moves each weight by one ulp, `gradient_scale` is 1 / ranks if right."""
    draw, move, own = random.Random(5), random.Random(seed), SAMPLES // ranks
    w, *data = (
        [[draw.uniform(-1, 1) for _ in range(columns)] for _ in range(rows)]
        for rows, columns in [(INPUTS, OUTPUTS), *[(SAMPLES, INPUTS), (SAMPLES, OUTPUTS)] * STEPS]
    )
    if seed is not None:
        w = [[math.nextafter(value, move.choice([-9, 9])) for value in row] for row in w]
    shard = {"placements": [{"axis": "dp", "kind": "shard", "dim": 0}]}
    rows = {**shard, "global_shape": [SAMPLES, OUTPUTS]}
    mean = {"placements": [{"axis": "dp", "kind": "partial", "reduction": "avg"}][: ranks - 1]}
    for step, (x, y) in enumerate(zip(data[::2], data[1::2])):
        records, grad = [], [[0.0] * OUTPUTS] * INPUTS
        for part in (slice(rank * own, (rank + 1) * own) for rank in range(ranks)):
            out = product(x[part], w)
            error = plus(out, -1, y[part])
            d_out = [[2 * e / own for e in row] for row in error]
            grad = plus(grad, gradient_scale or 1 / ranks, product(zip(*x[part]), d_out))
            loss = [[math.fsum(e * e for row in error for e in row) / own]]
            ids = [[step * SAMPLES + sample] for sample in range(SAMPLES)[part]]
            records.append([("data_id", "ids", ids, {**shard, "global_shape": [SAMPLES, 1]})])
            records[-1] += [("param", "w", w, {})] if step == 0 else []
            records[-1] += [("activation", "out", out, rows), ("scalar", "loss", loss, mean)]
            records[-1] += [("activation_grad", "out", d_out, {**rows, "grad_scale": ranks})]
        w = plus(w, -RATE, grad)
        after = [("grad", "w", grad, {}), ("param", "w", w, {"call": 1 if step == 0 else 0})]
        for rank, own_records in enumerate(records):
            write_rank(folder, rank, step, own_records + after)
    seal(folder, ranks)


if __name__ == "__main__":
    for number in (1, 2, 3):
        write_run(Path(sys.argv[1]) / f"perturbed{number}", seed=number)
    write_run(Path(sys.argv[1]) / "reference")
    write_run(Path(sys.argv[1]) / "right", ranks=2)
    write_run(Path(sys.argv[1]) / "faulty_sum", ranks=2, gradient_scale=1)
