# SPDX-License-Identifier: Apache-2.0
"""Compares the samples of runs as sets: whose they are, which are missing, which are there twice.

A sample is its rows of all inputs of a forward pass, bit by bit.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from . import _bundle, _safetensors
from ._data import CauseId, Finding
from ._mesh import DATA_AXES, Mesh

#: The axes over which ranks have whole samples, so that they can be joined along dim 0.
REPLAYED_AXES = (*DATA_AXES, "tp", "ep")
#: Samples of a rank that a sentence names.
_MOST_NAMED = 8


def mesh_of_bundle(run: Path) -> Mesh:
    """The mesh that a bundle was recorded on."""
    return Mesh.from_json(_bundle.read_manifest(run)["mesh"])


def heads_of(mesh: Mesh) -> list[int]:
    """One rank of each share of the samples, in the order of the shares."""
    found: dict[tuple[int, ...], int] = {}
    for rank in range(mesh.size):
        found.setdefault(mesh.share(rank), rank)
    return [found[at] for at in sorted(found)]


def micros_of(directory: Path, step: int, rank: int) -> list[int]:
    """The micro-batches of a rank's step, in order."""
    passes = _bundle.read_records(directory, step, rank).get("passes", {})
    return sorted({micro for of_name in passes.values() for micro, _ in of_name})


def inputs_of(directory: Path, step: int, rank: int) -> dict[int, dict[str, torch.Tensor]]:
    """A rank's inputs by micro-batch and name, cut as its forward passes had them."""
    content = _bundle.read_records(directory, step, rank)
    tensors = _bundle.read_some_tensors(directory, step, rank, "data_id/")
    found: dict[int, dict[str, torch.Tensor]] = {}
    for name, of_name in content.get("passes", {}).items():
        keys = sorted(
            (key for key in tensors if key.split("/", 1)[1].rpartition("/")[0] == name),
            key=lambda key: int(key.rpartition("/")[2]),
        )
        if len(keys) == 1:
            parts = list(torch.split(tensors[keys[0]], [rows for _, rows in of_name]))
        else:
            parts = [tensors[key] for key in keys]
        for (micro, _), part in zip(of_name, parts, strict=True):
            found.setdefault(micro, {})[name] = part
    return found


def check_samples(own: Path, run: Path) -> list[Finding]:
    """Samples that the ranks take twice, or leave out. No other rule can judge a replayed run.

    `own` is the single process with samples of its own. If the ranks take most of its samples and
    no others, the script shares samples out, so the ranks must take all. If not, each process draws
    its own, and no two ranks must draw the same.
    """
    mesh = mesh_of_bundle(run)
    steps = _bundle.read_manifest(own)["steps"]
    for step in (s for s in _bundle.read_manifest(run)["steps"] if s in steps):
        of_single = Counter(_samples(own, step, 0))
        of_ranks = {rank: _samples(run, step, rank) for rank in heads_of(mesh)}
        if found := _taken_twice(step, run, of_single, of_ranks):
            return [found]
        if found := _left_out(step, run, of_single, of_ranks):
            return [found]
    return []


def samples_of(directory: Path, step: int, rank: int) -> list[dict[str, torch.Tensor]]:
    """Each sample of a rank's step: its row of each input, by the input's name."""
    found: list[dict[str, torch.Tensor]] = []
    for _, inputs in sorted(inputs_of(directory, step, rank).items()):
        rows = len(next(iter(inputs.values()))) if inputs else 0
        parts = {n: t for n, t in inputs.items() if t.ndim > 0 and len(t) == rows}
        found += [{name: part[i] for name, part in parts.items()} for i in range(rows)]
    return found


def content_of(sample: dict[str, torch.Tensor]) -> bytes:
    """The bytes of a sample's rows, one input after the other."""
    return b"".join(_safetensors.bytes_of(row.contiguous()) for row in sample.values())


def _samples(directory: Path, step: int, rank: int) -> list[bytes]:
    return [content_of(sample) for sample in samples_of(directory, step, rank)]


def describe_foreign(reference: Path, run: Path) -> list[str]:
    """Says whose samples the ranks take in the first step in which some are not the reference's.

    Nothing is said of a mesh with axes that cut samples.
    """
    cut = mesh_of_bundle(run).axes
    if any(degree > 1 and axis not in REPLAYED_AXES for axis, degree in cut.items()):
        return []
    steps = _bundle.read_manifest(reference)["steps"]
    for step in (s for s in _bundle.read_manifest(run)["steps"] if s in steps):
        wanted = _samples(reference, step, 0)
        of_ranks = {r: _samples(run, step, r) for r in heads_of(mesh_of_bundle(run))}
        known = set(wanted)
        if not wanted or all(known.issuperset(samples) for samples in of_ranks.values()):
            continue
        told = "; ".join(_whose(rank, samples, wanted) for rank, samples in of_ranks.items())
        return [
            f"Samples of step {step}: {told}. If each process is meant to draw its own samples, "
            "judge with --replay."
        ]
    return []


def _whose(rank: int, samples: list[bytes], wanted: list[bytes]) -> str:
    places = {sample: i + 1 for i, sample in reversed(list(enumerate(wanted)))}
    found = [places[sample] for sample in samples if sample in places]
    if not found:
        return f"none of rank {rank}'s {len(samples)} is in the reference's batch"
    is_run = found == list(range(found[0], found[0] + len(found)))
    where = f"{found[0]} to {found[-1]}" if is_run else ", ".join(map(str, found[:_MOST_NAMED]))
    where += "" if is_run or len(found) <= _MOST_NAMED else ", ..."
    which = f"rank {rank}'s {len(samples)} are"
    if len(found) < len(samples):
        which = f"{len(found)} of rank {rank}'s {len(samples)} are"
    return f"{which} samples {where} of the reference's {len(wanted)}"


def _taken_twice(
    step: int, run: Path, of_single: Counter[bytes], of_ranks: dict[int, list[bytes]]
) -> Finding | None:
    """Whether all samples of a rank are another rank's, where the single process repeats few.

    Ranks that draw at random have some in common.
    """
    if 2 * len(of_single) <= of_single.total():
        return None  # the script itself takes samples several times
    ranks = list(of_ranks)
    for i, rank in enumerate(ranks):
        for other in ranks[:i]:
            shared = sum((Counter(of_ranks[rank]) & Counter(of_ranks[other])).values())
            if shared == len(of_ranks[rank]) > 0:
                numbers: dict[str, int | list[int]] = {
                    "samples": shared,
                    "own": len(of_ranks[rank]),
                    "rank": rank,
                    "other": other,
                }
                cause = CauseId("no_data_sampler")
                name = _first_input(run, step, rank)
                where = [other, rank]
                return Finding(step, name, "samples_twice", cause, where, numbers=numbers)
    return None


def _left_out(
    step: int, run: Path, of_single: Counter[bytes], of_ranks: dict[int, list[bytes]]
) -> Finding | None:
    """Whether the ranks take most samples of the single process, no others, and not all.

    Ranks that draw at random from few samples take some that the single process does not.
    """
    taken = Counter(sample for samples in of_ranks.values() for sample in samples)
    missing = (of_single - taken).total()
    if missing == 0 or 2 * missing >= of_single.total() or taken - of_single:
        return None
    numbers: dict[str, int | list[int]] = {"missing": missing, "samples": of_single.total()}
    name = _first_input(run, step, 0)
    cause = CauseId("samples_left_out")
    return Finding(step, name, "samples_missing", cause, list(of_ranks), numbers=numbers)


def _first_input(directory: Path, step: int, rank: int) -> str:
    records = _bundle.read_records(directory, step, rank)["records"]
    return str(next(r["name"] for r in records if r["kind"] == "data_id"))
