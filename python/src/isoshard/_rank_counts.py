# SPDX-License-Identifier: Apache-2.0
"""Compares what ranks do in a step as counts, before any record is laid out.

One rank may step twice or never, step without gradients, or have fewer or shorter samples. Then
the ranks' records do not fit together, and isoshard-judge would reject them all. The counts show
the mistake: they come from the recorder's hooks and from the samples themselves. A difference that
a right program may have, such as padding to other lengths, is no finding; `advice` says what to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from . import _bundle
from ._data import CauseId, Finding
from ._losses import has_same_loss
from ._mesh import Mesh
from ._safetensors import bytes_of
from ._sample_sets import REPLAYED_AXES, content_of, heads_of, mesh_of_bundle, samples_of
from .errors import RunError

Record = dict[str, Any]
#: A sample: its row of each input.
Sample = dict[str, torch.Tensor]
_OF_PASSES = ("data_id", "mask", "activation", "activation_grad")
#: Distance of replicas in units of the step, which no roundings make.
_CLEARLY = 0.1


class Part(IntEnum):
    """How much of a step both sides have in common."""

    NOTHING = 0
    READS = 1  # the weights that the first step reads
    PASSES = 2  # forward and backward up to the parameters' gradients
    ALL = 3


@dataclass(frozen=True)
class Parting:
    """The finding at which ranks part, and up to where the two runs can be compared.

    All steps before `step` can be, and `part` of that one.
    """

    finding: Finding
    step: int
    part: Part

    def keeps(self, step: int, record: Record) -> bool:
        """Whether a record is compared."""
        if step != self.step or self.part == Part.ALL:
            return step <= self.step
        is_read = step == 0 and record["kind"] == "param" and record["call"] == 0
        is_of_pass = record["kind"] in _OF_PASSES or _is_loss(record)
        return (is_read and self.part >= Part.READS) or (is_of_pass and self.part >= Part.PASSES)

    def keeps_journal(self, step: int) -> bool:
        """Whether the collective calls of a step are compared."""
        return step != self.step or self.part >= Part.PASSES


def _begin_of(step: int) -> Part:
    return Part.READS if step == 0 else Part.NOTHING


def _is_loss(record: Record) -> bool:
    return bool(record["kind"] == "scalar" and record["name"].startswith("loss"))


@dataclass
class _Rank:
    """What a rank did in a step."""

    run: Path
    step: int
    rank: int
    content: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.content = _bundle.read_records(self.run, self.step, self.rank)

    def names(self, kind: str) -> list[str]:
        """Names of its records of a kind, in their order."""
        return list(dict.fromkeys(r["name"] for r in self.content["records"] if r["kind"] == kind))

    def last_call(self, kind: str, name: str) -> int:
        """The number of a record's last call."""
        records = self.content["records"]
        return max(int(r["call"]) for r in records if (r["kind"], r["name"]) == (kind, name))

    @property
    def passes_without_step(self) -> int:
        """Backward passes that no optimizer step followed before the script ended."""
        return int(self.content.get("unfinished", 0))

    @property
    def is_idle(self) -> bool:
        """Whether it neither computed nor communicated between two optimizer steps."""
        calls = self.content.get("journal", {}).get("calls", [])
        return (
            not self.passes_without_step
            and not any(r["kind"] in _OF_PASSES or _is_loss(r) for r in self.content["records"])
            and all(call["op"] == "barrier" for call in calls)
        )

    def parameters(self) -> dict[str, list[torch.Tensor]]:
        """The parameters by name, as the step found them and as it left them.

        The first step has recorded both, a later one only what it left.
        """
        tensors = _bundle.read_some_tensors(self.run, self.step, self.rank, "param/")
        found: dict[str, list[torch.Tensor]] = {}
        for name in self.names("param"):
            keys = [f"param/{name}/{call}" for call in range(self.last_call("param", name) + 1)]
            found[name] = [tensors[key] for key in keys if key in tensors]
        if self.step > 0 and self.step - 1 in _bundle.read_manifest(self.run)["steps"]:
            before = _Rank(self.run, self.step - 1, self.rank).parameters()
            found = {n: [*before.get(n, [])[-1:], *own[-1:]] for n, own in found.items()}
        return found

    def is_unchanged(self) -> bool:
        """Whether it is known that the step changed no parameter that the rank holds."""
        pairs = self.parameters().values()
        is_known = bool(pairs) and all(len(pair) == 2 for pair in pairs)
        held = [(a, b) for a, b in pairs if a.numel()] if is_known else []
        return bool(held) and all(bytes_of(a) == bytes_of(b) for a, b in held)


def where_ranks_part(reference: Path, run: Path) -> Parting | None:
    """The first step in which ranks do what no right program does; None if there is none.

    Errors: RunError if a rank made no step, or had no gradients, and it is not known to be wrong.
    """
    with _bundle.checked(run):
        manifest, of_reference = _bundle.read_manifest(run), _bundle.read_manifest(reference)
        mesh, is_whole = mesh_of_bundle(run), "compared_with" not in manifest
        steps, known = manifest["steps"], of_reference["steps"]
        if mesh_of_bundle(reference).size > 1:
            return None
    for step in steps:
        with _bundle.checked(run):
            ranks = [_Rank(run, step, rank) for rank in range(mesh.size)]
        found = _steps_missing(ranks) or _steps_made_again(ranks) or _gradients_missing(ranks)
        if found is None and step in known:
            with _bundle.checked(run):
                samples = _Samples(reference, run, step, mesh)
                found = _steps_skipped(ranks, samples) or samples.parting()
        if found is not None:
            return found if is_whole else None  # a part of what was compared cannot be judged
    return None


def _steps_missing(ranks: Sequence[_Rank]) -> Parting | None:
    """Whether some ranks made no step after their backward passes, and others did."""
    lazy = [r for r in ranks if r.passes_without_step]
    if not lazy:
        return None
    others = [r for r in ranks if r not in lazy and r.names("param") == lazy[0].names("param")]
    if not others or not all(rank.is_unchanged() for rank in lazy):
        raise RunError(
            f"Rank {lazy[0].rank} must make an optimizer step after its "
            f"{lazy[0].passes_without_step} backward passes, got none before the script ended "
            f"(step {lazy[0].step}). Let the script train for a step, or record with "
            "isoshard.record if its optimizer is not a torch.optim.Optimizer."
        )
    step = lazy[0].step
    return Parting(_about_steps(lazy, others[0], 0), step, _begin_of(step))


def _steps_made_again(ranks: Sequence[_Rank]) -> Parting | None:
    """Whether some ranks step with nothing in between while others make their next passes."""
    idle = [r for r in ranks if r.is_idle]
    others = [r for r in ranks if r not in idle]
    if not idle or not others or ranks[0].step == 0 or any(r.is_unchanged() for r in idle):
        return None
    step = idle[0].step - 1
    steps = _bundle.read_manifest(idle[0].run)["steps"]
    if step not in steps:
        return None
    later = [_Rank(r.run, s, r.rank) for s in steps if s > step for r in idle[:1]]
    again = next((i for i, r in enumerate(later) if not r.is_idle), len(later))
    before = [_Rank(r.run, step, r.rank) for r in (*idle, others[0])]
    return Parting(_about_steps(before[:-1], before[-1], 1 + again), step, Part.ALL)


def _steps_skipped(ranks: Sequence[_Rank], samples: _Samples) -> Parting | None:
    """Whether ranks made several times the others' backward passes before they stepped.

    They threw gradients away in place of a step: all of their samples are those of a later one.
    """
    counts = {r: int(ranks[r].content.get("backward_passes", 0)) for r in samples.of_ranks}
    least = min(counts.values(), default=0)
    wanted = {_key(sample) for sample in samples.wanted}
    late = [
        rank
        for rank, count in counts.items()
        if least > 0 and count > least and count % least == 0
        if not wanted & {_key(sample) for sample in samples.of_ranks[rank]}
    ]
    others = [rank for rank in counts if counts[rank] == least]
    if not late or len(late) + len(others) < len(counts):
        return None
    if any(_key(sample) not in wanted for r in others for sample in samples.of_ranks[r]):
        return None
    step = ranks[0].step
    found = _about_steps([ranks[r] for r in late], ranks[others[0]], 0)
    return Parting(found, step, _begin_of(step))


def _about_steps(ranks: Sequence[_Rank], other: _Rank, steps: int) -> Finding:
    name = other.names("param")[0]
    return Finding(
        ranks[0].step,
        name,
        "optimizer_steps_differ",
        CauseId("steps_of_ranks_differ"),
        [r.rank for r in ranks],
        numbers={"rank": ranks[0].rank, "steps": steps, "other": other.rank, "other_steps": 1},
        kind="param",
        call=other.last_call("param", name),
    )


def _gradients_missing(ranks: Sequence[_Rank]) -> Parting | None:
    """Whether some ranks step without any gradient, so that their parameters stay as they are."""
    without = [r for r in ranks if not r.names("grad") and not r.is_idle and _has_stepped(r)]
    if not without:
        return None
    first = without[0]
    others = [r for r in ranks if r.names("grad") and r.names("param") == first.names("param")]
    is_proven = others and all(r.is_unchanged() for r in without) and not others[0].is_unchanged()
    if not is_proven:
        raise RunError(
            f"An optimizer step must have gradients, got none in step {first.step} on rank "
            f"{first.rank}. Let the script call backward before it, and not zero_grad in between."
        )
    finding = Finding(
        first.step,
        others[0].names("grad")[0],
        "gradient_missing_on_rank",
        CauseId("gradients_cleared"),
        [r.rank for r in without],
        numbers={"rank": first.rank, "other": others[0].rank},
        kind="grad",
    )
    return Parting(finding, first.step, Part.PASSES)


def _has_stepped(rank: _Rank) -> bool:
    """Whether the rank says that a step had no gradients; others may have recorded none."""
    return bool(rank.content.get("no_gradients", False))


# -- samples ---------------------------------------------------------------------------------


@dataclass
class _Cut:
    """A rank's sample that begins or ends like one of the reference, and is shorter."""

    rank: int
    length: int
    whole: Sample
    removed: Sample


class _Samples:
    """The samples of a step: whose they are, and which are missing, cut or too many."""

    def __init__(self, reference: Path, run: Path, step: int, mesh: Mesh) -> None:
        self.reference, self.run, self.step, self.mesh = reference, run, step, mesh
        self.wanted: list[Sample] = []
        self.of_ranks: dict[int, list[Sample]] = {}
        self.cut: list[_Cut] = []
        self.more: list[Sample] = []  # what ranks have and the reference has not
        self.missing: list[Sample] = []
        axes = [axis for axis, degree in mesh.axes.items() if degree > 1]
        if mesh.data_degree == 1 or any(axis not in (*REPLAYED_AXES, "pp") for axis in axes):
            return  # another axis cuts samples
        self.wanted = samples_of(reference, step, 0)
        self.of_ranks = {rank: samples_of(run, step, rank) for rank in heads_of(mesh)}
        self._match()

    def _match(self) -> None:
        places: dict[bytes, list[int]] = {}
        for i, sample in enumerate(self.wanted):
            places.setdefault(_key(sample), []).append(i)
        rest = []
        for rank, samples in self.of_ranks.items():
            for sample in samples:
                at = places.get(_key(sample))
                if at:
                    at.pop(0)
                else:
                    rest.append((rank, sample))
        free = [self.wanted[i] for i in sorted(i for at in places.values() for i in at)]
        for rank, sample in rest:
            found = ((i, _cut_of(rank, sample, whole)) for i, whole in enumerate(free))
            i, cut = next(((i, cut) for i, cut in found if cut is not None), (0, None))
            if cut is None:
                self.more.append(sample)
            else:
                self.cut.append(cut)
                del free[i]
        self.missing = free

    def parting(self) -> Parting | None:
        """What is wrong, if it is known that something is.

        Samples that count nothing, such as those without labels, may differ: the loss is the same.
        """
        finding = self._shortened() or self._left_out() or self._added()
        if finding is None or has_same_loss(self.reference, self.run, self.step):
            return None
        return Parting(finding, self.step, _begin_of(self.step))

    def _name(self, rank: int) -> str:
        return next(iter(self.of_ranks[rank][0]))

    def _shortened(self) -> Finding | None:
        if not self.cut or self.more or self.may_be_padding():
            return None
        first = self.cut[0]
        name = next(iter(first.removed))
        ranks = sorted({cut.rank for cut in self.cut})
        numbers: dict[str, float | list[int]] = {
            "rank": first.rank,
            "shortened": sum(cut.rank == first.rank for cut in self.cut),
            "samples": len(self.of_ranks[first.rank]),
            "length": first.length,
            "whole": len(first.whole[name]),
        }
        cause = CauseId("samples_cut")
        return Finding(self.step, name, "samples_shortened", cause, ranks, numbers=numbers)

    def may_be_padding(self) -> bool:
        """Whether what is cut off some input is one value everywhere.

        An input that is the same for all samples, such as positions, shows nothing.
        """
        return bool(self.cut) and any(
            len({bytes_of(value) for cut in self.cut for value in cut.removed[name].flatten()}) == 1
            for name in self.cut[0].removed
            if len({bytes_of(sample[name]) for sample in self.wanted}) > 1
        )

    def _left_out(self) -> Finding | None:
        """Whether ranks with fewer samples than others leave some of the reference's out."""
        counts = {rank: len(samples) for rank, samples in self.of_ranks.items()}
        if not self._is_subset() or len(set(counts.values())) == 1:
            return None
        ranks = [rank for rank, count in counts.items() if count < max(counts.values())]
        numbers = {"missing": len(self.missing), "samples": len(self.wanted)}
        name, cause = self._name(next(r for r in counts if counts[r])), CauseId("samples_left_out")
        return Finding(self.step, name, "samples_missing", cause, ranks, numbers=numbers)

    def _is_subset(self) -> bool:
        """Whether the ranks have most of the reference's samples, not all, and no others."""
        is_most = 0 < 2 * len(self.missing) < len(self.wanted)
        return is_most and not self.more and not self.cut

    def _added(self) -> Finding | None:
        """Whether the ranks have all of the reference's samples, and some that it had before."""
        is_filled = self.wanted and not self.missing and not self.cut
        if not is_filled or not 0 < len(self.more) < self.mesh.data_degree:
            return None
        steps = [s for s in _bundle.read_manifest(self.reference)["steps"] if s <= self.step]
        known = {_key(sample) for s in steps for sample in samples_of(self.reference, s, 0)}
        added = {_key(sample) for sample in self.more}
        if not added <= known:
            return None
        ranks = [r for r, own in self.of_ranks.items() if added & {_key(s) for s in own}]
        whole = len(self.wanted) + len(self.more)
        numbers = {"samples": whole, "added": len(self.more)}
        name, cause = self._name(ranks[0]), CauseId("samples_repeated_to_fill")
        return Finding(self.step, name, "samples_added", cause, ranks, numbers=numbers)

    def advice(self) -> str:
        """What to do if ranks have other samples, and a right program may have them."""
        where = f"step {self.step}"
        if self.cut and not self.more:
            first = self.cut[0]
            name = next(iter(first.removed))
            return (
                f"Ranks must pad samples to the length of the single process, got {first.length} "
                f"positions on rank {first.rank} and {len(first.whole[name])} in the single "
                f"process ({name}, {where}). What is missing may be padding. Pad all samples to "
                "one fixed length, and judge again."
            )
        if self._is_subset():
            return (
                f"The ranks must have all samples of the single process, got {len(self.missing)} "
                f"of its {len(self.wanted)} on no rank ({where}), as where a remainder is dropped. "
                f"Let batches be multiples of {self.mesh.data_degree}, or record fewer steps "
                "(--steps)."
            )
        return ""


def _key(sample: Sample) -> bytes:
    shapes = str([(name, list(row.shape)) for name, row in sample.items()])
    return shapes.encode() + content_of(sample)


def _cut_of(rank: int, sample: Sample, whole: Sample) -> _Cut | None:
    """The sample as a part of a whole one, from its beginning or up to its end."""
    if sample.keys() != whole.keys():
        return None
    for is_tail in (False, True):
        removed: Sample = {}
        lengths = set()
        for name, own in sample.items():
            other = whole[name]
            if own.shape == other.shape and torch.equal(own, other):
                continue
            cut = other.shape[0] - own.shape[0] if own.ndim == other.ndim > 0 else 0
            if cut <= 0 or own.shape[0] == 0 or own.shape[1:] != other.shape[1:]:
                break
            kept, removed[name] = (
                (other[cut:], other[:cut]) if is_tail else (other[:-cut], other[-cut:])
            )
            lengths.add(own.shape[0])
            if not torch.equal(own, kept):
                break
        else:
            if removed:
                return _Cut(rank, min(lengths), whole, removed)
    return None


def advice(reference: Path, run: Path) -> str:
    """What to do about samples that do not fit; empty if nothing is known."""
    steps = _bundle.read_manifest(reference)["steps"]
    for step in (s for s in _bundle.read_manifest(run)["steps"] if s in steps):
        if found := _Samples(reference, run, step, mesh_of_bundle(run)).advice():
            return found
    return ""


# -- replicas --------------------------------------------------------------------------------


def replicas_apart(reference: Path, run: Path) -> Parting | None:
    """Whether ranks begin with one model and have clearly different ones after a step.

    It asks nothing of the samples, so that it is for runs whose samples are not the reference's.
    Only data-parallel ranks that hold whole tensors are looked at.
    """
    mesh = mesh_of_bundle(run)
    shapes = {
        r["name"]: tuple(r["local_shape"])
        for r in _bundle.read_records(reference, 0, 0)["records"]
        if r["kind"] == "param"
    }
    if mesh.data_degree != mesh.size or 0 not in _bundle.read_manifest(run)["steps"]:
        return None
    for step in _bundle.read_manifest(run)["steps"]:
        ranks = [_Rank(run, step, rank) for rank in range(mesh.size)]
        if any(rank.is_idle or not rank.names("grad") for rank in ranks):
            return None  # the ranks' steps are not of the same passes
        held = [rank.parameters() for rank in ranks]
        is_whole = all(
            of_rank.keys() == shapes.keys()
            and all(len(p) == 2 and tuple(p[0].shape) == shapes[n] for n, p in of_rank.items())
            for of_rank in held
        )
        first = held[0]
        if not is_whole or any(not _are_same(first[n][0], p[n][0]) for p in held for n in p):
            return None
        moved = math.hypot(*(float((b - a).double().norm()) for a, b in first.values()))
        for rank, other in zip(ranks[1:], held[1:], strict=True):
            apart = math.hypot(*(_distance(first[n][1], other[n][1]) for n in first))
            if apart > _CLEARLY * moved > 0:
                return Parting(_about_replicas(ranks[0], rank, apart / moved), 0, Part.READS)
    return None


def _about_replicas(first: _Rank, other: _Rank, distance: float) -> Finding:
    kind, name = next(_different(first, other))
    return Finding(
        first.step,
        name,
        "replicas_differ",
        CauseId("replicas_train_apart"),
        [first.rank, other.rank],
        numbers={"rank": first.rank, "other": other.rank, "distance": distance},
        kind=kind,
        call=first.last_call(kind, name),
    )


def _different(first: _Rank, other: _Rank) -> Iterator[tuple[str, str]]:
    """Gradients, then parameters, of which two ranks have clearly different copies."""
    for kind in ("grad", "param"):
        for name in first.names(kind):
            key = f"{kind}/{name}/{first.last_call(kind, name)}"
            a, b = (
                _bundle.read_some_tensors(r.run, r.step, r.rank, key).get(key)
                for r in (first, other)
            )
            if a is None or b is None or a.shape != b.shape:
                continue
            if _distance(a, b) > _CLEARLY * float(a.double().norm()) * (kind == "grad"):
                yield kind, name


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm())


def _are_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bytes_of(a) == bytes_of(b)
