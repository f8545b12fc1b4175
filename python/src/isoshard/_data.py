# SPDX-License-Identifier: Apache-2.0
"""Says plainly when ranks draw other samples than the single process, or normalize by them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from . import _bundle, _safetensors
from ._calls import BACKWARD, REDUCING
from ._mesh import DATA_AXES, Mesh

Shape = tuple[int, ...]
_ONE_NUMBER = 8  # bytes


@dataclass(frozen=True)
class CauseId:
    """An id of 'isoshard list causes', which the judge puts into words with these values."""

    id: str
    numbers: Mapping[str, float | list[int]] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """An input of one step that makes the run wrong, as isoshard-judge compare --findings reads it.

    `id` is that of a finding ('isoshard list findings'), which the judge puts into words with
    `numbers` and `words`. `samples` is how many the single process has, where each rank has as many
    of its own. A finding with `only_if_diverging` is added to a run that diverges anyway.
    """

    step: int
    name: str
    id: str
    cause: CauseId | None
    ranks: list[int]
    samples: int | None = None
    numbers: Mapping[str, float | list[int]] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    kind: str = "data_id"
    call: int = 0
    only_if_diverging: bool = False

    def to_json(self) -> dict[str, Any]:
        """An entry of the file."""
        return {
            "step": self.step,
            "kind": self.kind,
            "name": self.name,
            "call": self.call,
            "finding": {"id": self.id, "numbers": dict(self.numbers), "words": self.words},
            "cause": "" if self.cause is None else asdict(self.cause),
            "ranks": self.ranks,
            "only_if_diverging": self.only_if_diverging,
        }


@dataclass(frozen=True)
class Cause:
    """What makes a run differ from one process though nothing is wrong in it.

    It shows first at the tensor that `kind` and `name` say. A cause without an id is in words.
    """

    step: int
    kind: str
    name: str
    cause: CauseId | str

    def to_json(self) -> dict[str, Any]:
        """An entry of the file."""
        return asdict(self)


_NO_SAMPLER = CauseId("no_data_sampler")
_GIVEN, _GIVEN_CAUSE = "given", "given_cause"  # in words


def check_samples(reference: Path, run: Path) -> list[Finding]:
    """Inputs that the data-parallel ranks do not share out; none if all is well.

    Inputs of one step, call and name that are cut on no rank are copies to the judge: equal ones
    conform, though every rank does the work of the whole batch.
    """
    found: dict[tuple[str, str, str], Finding] = {}
    with _bundle.checked(run):
        manifest = _bundle.read_manifest(run)
        mesh = Mesh.from_json(manifest["mesh"])
        parts = _bundle.read_manifest(reference)["mesh"]
        if any(int(a["degree"]) > 1 for a in parts):
            return []  # a reference of several ranks has shares, too
        if lost := _lost_passes(reference, run, mesh):
            return lost
        if mesh.data_degree == 1:
            return []
        for step in manifest["steps"]:
            if step in _bundle.read_manifest(reference)["steps"]:
                wanted = _inputs(reference, step, 0)
                ranks = [_inputs(run, step, rank) for rank in range(mesh.size)]
                of_step = _about_calls(step, wanted, ranks)
                whole = _about_whole(reference, run, step, wanted, ranks, mesh)
                of_step += whole or _about_copies(run, step, wanted, mesh)
                for finding in of_step:
                    key = (finding.name, finding.id, str(finding.numbers))
                    found.setdefault(key, finding)
    return list(found.values())


def _lost_passes(reference: Path, run: Path, mesh: Mesh) -> list[Finding]:
    """Finds the first step in which the side that discarded more forward passes has fewer samples.

    A recording forgets a forward pass whose gradients no step has read. If it was a micro-batch,
    its samples are on one side alone, and all that was computed of them.
    """
    heads = [  # one rank of each share of the data
        rank
        for rank in range(mesh.size)
        if not any(c for axis, c in mesh.coordinates(rank).items() if axis not in DATA_AXES)
    ]
    steps = _bundle.read_manifest(run)["steps"]
    for step in (s for s in _bundle.read_manifest(reference)["steps"] if s in steps):
        wanted, *counts = (
            _bundle.read_records(bundle, step, rank).get("unread", 0)
            for bundle, rank in [(reference, 0), *((run, rank) for rank in range(mesh.size))]
        )
        others = [rank for rank, count in enumerate(counts) if count != wanted]
        known = _samples_by_shape([_inputs(reference, step, 0)]) if others else {}
        own = _samples_by_shape([_inputs(run, step, rank) for rank in heads]) if others else {}
        missing = {key: number - own.get(key, number) for key, number in known.items()}
        # Inputs that all ranks have whole, such as positions, are more on the ranks.
        most = max(missing, key=lambda key: missing[key], default=None)
        more = max(counts) - wanted  # passes that ranks threw away
        if most is not None and missing[most] * more > 0:
            problem = f"the ranks have {own[most]} samples, the reference has {known[most]}"
            why = (
                "forward passes whose gradients no step reads (cleared, or without backward): "
                f"{counts[others[0]]} on rank {others[0]}, {wanted} in the reference"
            )
            cause = CauseId(_GIVEN_CAUSE, words={"problem": why})
            words = {"problem": problem}
            return [Finding(step, most[0], _GIVEN, cause, others, words=words)]
    return []


def _samples_by_shape(inputs: list[dict[str, list[Shape]]]) -> Counter[tuple[str, Shape]]:
    """The number of samples of each input by the shape of one; cp, say, cuts the shape."""
    found: Counter[tuple[str, Shape]] = Counter()
    for of_rank in inputs:
        for name, shapes in of_rank.items():
            for shape in shapes:
                if shape:
                    found[name, shape[1:]] += shape[0]
    return found


def is_about_lost_passes(findings: Sequence[Finding]) -> bool:
    """Whether only inputs can be compared, because the sides computed on different samples."""
    return any(finding.id == _GIVEN for finding in findings)


def _about_copies(
    run: Path, step: int, wanted: dict[str, list[Shape]], mesh: Mesh
) -> list[Finding]:
    """Whether data-parallel ranks read equal inputs, of which cp cuts another dim.

    Then no rank has as large an input as the single process has.
    """
    cut = mesh.axes.get("cp", 1)
    if cut == 1:
        return []
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.size):
        at = tuple(c for axis, c in mesh.coordinates(rank).items() if axis not in DATA_AXES)
        groups.setdefault(at, []).append(rank)
    for ranks in groups.values():
        first, *others = (_bundle.read_some_tensors(run, step, r, "data_id/") for r in ranks)
        if not first or not all(_are_equal(first, other) for other in others):
            continue
        for name, shapes in wanted.items():
            own = sum(t.numel() for key, t in first.items() if key.split("/")[1] == name)
            if own * cut * mesh.data_degree > sum(math.prod(shape) for shape in shapes):
                numbers: dict[str, int | list[int]] = {"ranks": ranks}
                return [Finding(step, name, "equal_inputs", _NO_SAMPLER, ranks, numbers=numbers)]
    return []


def _are_equal(first: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    own, theirs = (  # bytes, since a NaN is equal to none
        {name: _safetensors.bytes_of(tensor) for name, tensor in tensors.items()}
        for tensors in (first, other)
    )
    return own == theirs


def causes_in_data(reference: Path, run: Path) -> list[Cause]:
    """What makes a run differ from one process though its parallelism is right."""
    from ._losses import wrong_losses
    from ._means import mean_of_means

    with _bundle.checked(run):
        manifest = _bundle.read_manifest(run)
        mesh = Mesh.from_json(manifest["mesh"])
        step = _bundle.read_manifest(reference)["steps"][0]
        if mesh.data_degree == 1 or step not in manifest["steps"]:
            return []
        return [
            *_batch_statistics(reference, step),
            *(mean_of_means(reference, run, step) or wrong_losses(reference, run)),
            *_coarse_reductions(reference, run, step),
        ]


def _coarse_reductions(reference: Path, run: Path, step: int) -> list[Cause]:
    """Whether the run reduces gradients in a coarser dtype than they have, and the reference not.

    A framework may be asked to. What it makes of a gradient is then no bug, and not what one
    process computes.
    """
    records = _bundle.read_records(reference, step, 0)["records"]
    gradients = [r for r in records if r["kind"] == "grad"]
    finer = max((_roundoff(r["dtype"]) for r in gradients), default=1.0)
    of_reference = _dtypes_of_reductions(reference, step)
    found = {d for d in _dtypes_of_reductions(run, step) - of_reference if _roundoff(d) > finer}
    if not found:
        return []
    names = " and ".join(sorted(of_reference))
    theirs = f"reduces in {names}" if of_reference else "has no reduction"
    text = f"gradients are reduced in {' and '.join(sorted(found))}; the reference {theirs}"
    return [Cause(step, "grad", gradients[0]["name"], text)]


def _roundoff(dtype: str) -> float:
    """0 of integers, and of what is not known."""
    found = [real for real, (name, _) in _safetensors.DTYPES.items() if name == dtype]
    return torch.finfo(found[0]).eps if found and found[0].is_floating_point else 0.0


def _dtypes_of_reductions(directory: Path, step: int) -> set[str]:
    """Of what rank 0 reduces over others in backward passes."""
    calls = _bundle.read_records(directory, step, 0).get("journal", {}).get("calls", [])
    return {
        call["dtype"]
        for call in calls
        if call["phase"] == BACKWARD and call["op"] in REDUCING and "dtype" in call
    }


def unread_results(run: Path) -> list[str]:
    """A sentence for each line of the script whose collective has a result that nobody reads.

    Single numbers are left out: they are often reduced to let ranks wait for each other.
    """
    found: dict[tuple[str, str], str] = {}
    with _bundle.checked(run):
        manifest = _bundle.read_manifest(run)
        size = Mesh.from_json(manifest["mesh"]).size
        for step in manifest["steps"]:
            for rank in range(size):
                journal = _bundle.read_records(run, step, rank).get("journal", {})
                for call in journal.get("calls", []):
                    if call.get("unread") and call["bytes"] > _ONE_NUMBER:
                        where = f"rank {rank}, step {step}, {call['phase']}, {call['bytes']} bytes"
                        found.setdefault((call["op"], call["at"]), where)
    return [
        f"Nobody reads the result of {op} at {at} ({where}): it is written into a copy that is "
        "dropped. Assign the copy first, reduce it, and use it."
        for (op, at), where in found.items()
    ]


def _batch_statistics(reference: Path, step: int) -> list[Cause]:
    records = _bundle.read_records(reference, step, 0)["records"]
    end = ".running_var.buffer"
    names = sorted({r["name"].removesuffix(end) for r in records if r["name"].endswith(end)})
    if not names:
        return []
    cause = CauseId("batch_statistics", {"modules": len(names)}, {"module": names[0]})
    of_forward = [r["name"] for r in records if r["kind"] == "activation" and r["name"] in names]
    return [Cause(step, "activation", next(iter([*of_forward, *names])), cause)]


def _inputs(directory: Path, step: int, rank: int) -> dict[str, list[Shape]]:
    """The shapes of each input's calls."""
    calls: dict[str, list[Shape]] = {}
    for record in _bundle.read_records(directory, step, rank)["records"]:
        if record["kind"] == "data_id":
            calls.setdefault(record["name"], []).append(tuple(record["local_shape"]))
    return calls


def _about_calls(
    step: int, wanted: dict[str, list[Shape]], ranks: list[dict[str, list[Shape]]]
) -> list[Finding]:
    """The first input that ranks get in another number of calls than the single process."""
    for name in wanted:
        ours = len(wanted[name])
        others = [r for r, actual in enumerate(ranks) if len(actual.get(name, [])) not in (0, ours)]
        if others:
            theirs = len(ranks[others[0]][name])
            numbers: dict[str, int | list[int]] = {
                "reference_calls": ours,
                "rank": others[0],
                "calls": theirs,
            }
            cause = CauseId("other_micro_batches")
            return [Finding(step, name, "other_number_of_calls", cause, others, numbers=numbers)]
    return []


def _about_whole(
    reference: Path,
    run: Path,
    step: int,
    wanted: dict[str, list[Shape]],
    ranks: list[dict[str, list[Shape]]],
    mesh: Mesh,
) -> list[Finding]:
    """Inputs that some rank has as large as the single process, where they hold samples."""
    cut: set[tuple[int, int]] = set()  # dims that some rank has in part, and their sizes
    whole: dict[str, list[int]] = {}
    for name, shapes in wanted.items():
        for call, shape in enumerate(shapes):
            for rank, actual in enumerate(ranks):
                theirs = actual.get(name, [])
                if call >= len(theirs) or len(theirs[call]) != len(shape) or not shape:
                    continue
                if theirs[call] == shape:
                    whole.setdefault(name, []).append(rank)
                cut |= {(dim, size) for dim, size in enumerate(shape) if theirs[call][dim] < size}
    found = []
    for name, having in whole.items():
        if len({mesh.share(rank) for rank, own in enumerate(ranks) if own.get(name)}) == 1:
            continue  # others have no samples: too few were left for all
        shape = wanted[name][0]
        is_cut_elsewhere = any((dim, size) in cut for dim, size in enumerate(shape))
        if cut and not is_cut_elsewhere:
            continue  # positions and masks need not be cut where the samples are
        samples, having = shape[0], sorted(set(having))
        finding = Finding(
            step,
            name,
            "samples_not_shared",
            _NO_SAMPLER,
            having,
            numbers={
                "samples": samples,
                "having": len(having),
                "data_ranks": mesh.data_degree,
            },
        )
        steps = _steps_read(reference, run, step, name, having)
        if len(steps) > 1:
            cause = CauseId("optimizer_step_skipped", {"steps": steps})
            found.append(replace(finding, cause=cause))
            continue
        if not _have_own_samples(run, step, name, having, mesh):
            found.append(finding)
            continue
        cause = CauseId("own_samples_on_each_rank", {"samples": samples * mesh.data_degree})
        found.append(replace(finding, cause=cause, samples=samples))
    return found


def _steps_read(reference: Path, run: Path, step: int, name: str, having: list[int]) -> list[int]:
    """The steps of the reference whose samples each rank reads in one; empty if ranks read others.

    Ranks that read a step each share out steps, and leave none out.
    """
    steps = _bundle.read_manifest(reference)["steps"]
    known = {sample: s for s in reversed(steps) for sample in _samples(reference, s, 0, name)}
    of_ranks = [{known.get(s, -1) for s in _samples(run, step, rank, name)} for rank in having]
    is_each = all(found == of_ranks[0] for found in of_ranks) and -1 not in of_ranks[0]
    return sorted(of_ranks[0]) if is_each else []


def _samples(directory: Path, step: int, rank: int, name: str) -> list[bytes]:
    tensors = _bundle.read_some_tensors(directory, step, rank, f"data_id/{name}/")
    return [
        _safetensors.bytes_of(sample.contiguous())
        for key in sorted(tensors)
        for sample in (tensors[key] if tensors[key].ndim > 0 else [])
    ]


def _have_own_samples(run: Path, step: int, name: str, having: list[int], mesh: Mesh) -> bool:
    """Whether every data-parallel share has inputs of this name, no two of them equal."""
    shares: dict[tuple[int, ...], bytes] = {}
    for rank in having:
        at = mesh.share(rank)
        if at not in shares:
            tensors = _bundle.read_some_tensors(run, step, rank, f"data_id/{name}/")
            own = [tensors[key] for key in sorted(tensors)]
            shares[at] = b"".join(_safetensors.bytes_of(t) for t in own)
    return len(set(shares.values())) == len(shares) == mesh.data_degree
