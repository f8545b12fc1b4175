# SPDX-License-Identifier: Apache-2.0
"""Names the ranks whose loss is wrong, and what is wrong about it.

One process has one loss for the whole batch, so a wrong loss is wrong on all ranks. But its
gradient at the model's output has a row for each token. A rank whose loss is right has the rows
that the single process has, whatever the loss is divided by. Where the output is right on all ranks
and these rows are wrong on some, the loss of these ranks is wrong, and the rows show how: a loss
that is scaled scales them, one that ignores a token makes its row 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from . import _bundle
from ._data import Cause, CauseId
from ._mesh import Mesh
from ._sample_sets import heads_of, mesh_of_bundle

#: How far from rows that a relation gives right rows may be, in units of the root of the roundoff
#: of the gradient's dtype: 1.7e-4 in float32.
_ROUNDING = 0.5
#: Shares of tokens with other labels from which on labels are compared, and positions that they may
#: be moved by.
_FEW, _MOST_MOVED = 0.02, 3
#: Relative difference from which on a loss is looked at; the judge decides whether it is wrong.
_LEAST = 1e-5
#: Numbers of an output above which it is not looked at.
_MOST_NUMBERS = 1 << 26


@dataclass(frozen=True)
class _Share:
    """A data-parallel share of the samples: its ranks, and its rows of the output."""

    ranks: list[int]
    micros: list[int]  # of each sample
    output: torch.Tensor
    wanted_output: torch.Tensor
    gradient: torch.Tensor  # rows of tokens by values of the last dim
    wanted: torch.Tensor
    shape: tuple[int, ...]  # of the rows: samples, tokens
    loss: float  # that the share's first rank has differentiated
    scale: float  # between the loss of a share and the loss of all
    raw: torch.Tensor  # the gradient as it was recorded

    def rows_of(self, micro: int) -> torch.Tensor:
        """Which rows are of a micro-batch."""
        samples = torch.tensor([own == micro for own in self.micros])
        return samples.repeat_interleave(len(self.gradient) // len(samples))


def wrong_losses(reference: Path, run: Path) -> list[Cause]:
    """What makes the loss wrong on some ranks, where the model's output is right on all of them.

    Only the first step in which the loss differs is looked at: later ones follow from it.
    """
    known = _bundle.read_manifest(run)["steps"]
    for step in (s for s in _bundle.read_manifest(reference)["steps"] if s in known):
        found = _losses_of(reference, run, step)
        if found is None:
            return []
        if not _are_equal(*found):
            return _wrong_losses(reference, run, step, found[0])
    return []


def has_same_loss(reference: Path, run: Path, step: int) -> bool:
    """Whether the ranks' losses are known to make that of the single process."""
    found = _losses_of(reference, run, step)
    return found is not None and _are_equal(*found)


def _losses_of(reference: Path, run: Path, step: int) -> tuple[float, float] | None:
    """The loss of the single process and that of all ranks; None where one is not known."""
    mesh = mesh_of_bundle(run)
    wanted = _loss_of(reference, step, [0])
    losses = [_loss_of(run, step, _ranks_of_share(mesh, head)) for head in heads_of(mesh)]
    own = [loss for loss in losses if loss is not None]
    if wanted is None or len(own) < len(losses):
        return None
    return wanted, sum(own) / (1 if _is_sum(run, step) else len(own))


def _are_equal(wanted: float, whole: float) -> bool:
    return abs(whole - wanted) <= _LEAST * abs(wanted)


def _wrong_losses(reference: Path, run: Path, step: int, wanted: float) -> list[Cause]:
    found = _shares_of(reference, run, step)
    if found is None:
        return []
    output, shares, dtype = found
    limit = _ROUNDING * math.sqrt(torch.finfo(dtype).eps)
    if any(_error(s.output, s.wanted_output) > limit for s in shares):
        return []  # forward is wrong
    errors = [_error(share.gradient, share.wanted) for share in shares]
    wrong = [s for s, error in zip(shares, errors, strict=True) if not error <= limit]
    if not wrong:
        cause = _term_beside(output, shares, wanted, _is_sum(run, step), limit)
    else:
        labels = _labels_of(run, step, shares)
        cause = _cause_of(output, wrong, shares, labels, limit)
    return [] if cause is None else [Cause(step, "scalar", "loss", cause)]


# -- what is recorded -------------------------------------------------------------------------


def _shares_of(
    reference: Path, run: Path, step: int
) -> tuple[str, list[_Share], torch.dtype] | None:
    """The name of the model's output, and each share's part of it; None where that is not known."""
    mesh = mesh_of_bundle(run)
    name = _output_of(reference, step)
    if name is None or mesh.axes.get("cp", 1) > 1:
        return None
    wanted = {
        kind: _bundle.read_some_tensors(reference, step, 0, f"{kind}/{name}/").get(
            f"{kind}/{name}/0"
        )
        for kind in ("activation", "activation_grad")
    }
    whole = {kind: tensor for kind, tensor in wanted.items() if tensor is not None}
    if len(whole) < len(wanted) or whole["activation"].numel() > _MOST_NUMBERS:
        return None
    shares = []
    for head in heads_of(mesh):
        share = _share_of(run, step, name, _ranks_of_share(mesh, head), whole)
        if share is None:
            return None
        shares.append(share)
    return name, shares, whole["activation_grad"].dtype


def _output_of(reference: Path, step: int) -> str | None:
    """The last module that the model calls once and whose output gets a gradient."""
    records = _bundle.read_records(reference, step, 0)["records"]
    outputs = [r for r in records if r["kind"] == "activation"]
    gradients = {(r["name"], r["call"]) for r in records if r["kind"] == "activation_grad"}
    last = next((r for r in reversed(outputs) if (r["name"], r["call"]) in gradients), None)
    if last is None or last["call"] > 0 or len(last["local_shape"]) < 2:
        return None
    return str(last["name"])


def _share_of(
    run: Path,
    step: int,
    name: str,
    ranks: list[int],
    whole: dict[str, torch.Tensor],
) -> _Share | None:
    """Puts a share together of what its ranks hold; None if they do not hold all of it."""
    parts: dict[str, torch.Tensor] = {}
    samples: list[int] | None = None
    loss = _loss_of(run, step, ranks)
    micros: list[int] = []
    scale = 1.0
    for kind, wanted in whole.items():
        filled = torch.full_like(wanted, math.nan, dtype=torch.float64)
        for rank in ranks:
            content = _bundle.read_records(run, step, rank)
            record = next((r for r in content["records"] if _is(r, kind, name)), None)
            if record is None:
                continue
            boxes = record.get("boxes")
            if boxes is None or record.get("placements") or record["global_shape"] != list(
                wanted.shape
            ):
                return None
            key = f"{kind}/{name}/0"  # the module may be called again, for no gradient
            tensor = _bundle.read_some_tensors(run, step, rank, key)[key]
            for box in boxes:
                begin, end = box["local_offset"], box["global_offset"]
                here = tuple(slice(b, b + n) for b, n in zip(begin, box["size"], strict=True))
                there = tuple(slice(b, b + n) for b, n in zip(end, box["size"], strict=True))
                filled[there] = tensor[here].double()
            own = [
                box["global_offset"][0] + i for box in boxes for i in range(int(box["size"][0]))
            ]
            samples = own if samples is None else samples
            if set(own) != set(samples):
                return None
            if kind == "activation_grad":
                scale = _bundle.grad_scale_of(record)
            micros = micros or _micros_of(content, len(samples))
        parts[kind] = filled
    if samples is None or loss is None:
        return None
    samples = list(dict.fromkeys(samples))
    rows = {kind: tensor[samples] for kind, tensor in parts.items()}
    if any(bool(tensor.isnan().any()) for tensor in rows.values()):
        return None
    flat = {kind: tensor.flatten(0, -2) for kind, tensor in rows.items()}
    right = {kind: tensor[samples].double().flatten(0, -2) for kind, tensor in whole.items()}
    return _Share(
        ranks=ranks,
        micros=micros if len(micros) == len(samples) else [0] * len(samples),
        output=flat["activation"],
        wanted_output=right["activation"],
        gradient=flat["activation_grad"] / scale,
        wanted=right["activation_grad"],
        shape=tuple(rows["activation"].shape[:-1]),
        loss=loss,
        scale=scale,
        raw=flat["activation_grad"],
    )


def _ranks_of_share(mesh: Mesh, head: int) -> list[int]:
    return [rank for rank in range(mesh.size) if mesh.share(rank) == mesh.share(head)]


def _loss_of(directory: Path, step: int, ranks: Sequence[int]) -> float | None:
    """The loss that the first of these ranks that has one has differentiated."""
    for rank in ranks:
        found = _bundle.read_some_tensors(directory, step, rank, "scalar/loss/")
        if found:
            return float(next(iter(found.values())))
    return None


def _labels_of(run: Path, step: int, shares: Sequence[_Share]) -> list[int] | None:
    """The number of labels that each share's losses took; None where that is not known."""
    contents = [_bundle.read_records(run, step, share.ranks[0]) for share in shares]
    counts = [content.get("labels", []) for content in contents]
    return [sum(own) for own in counts] if all(counts) else None


def _is(record: dict[str, Any], kind: str, name: str) -> bool:
    return (record["kind"], record["name"], record["call"]) == (kind, name, 0)


def _micros_of(content: dict[str, Any], samples: int) -> list[int]:
    """The micro-batch of each of a rank's samples; empty where its passes do not show it."""
    for of_name in content.get("passes", {}).values():
        if sum(rows for _, rows in of_name) == samples:
            return [micro for micro, rows in of_name for _ in range(rows)]
    return []


def _is_sum(run: Path, step: int) -> bool:
    """Whether the ranks' losses are summands of the whole."""
    records = _bundle.read_records(run, step, 0)["records"]
    loss: dict[str, Any] = next((r for r in records if _is(r, "scalar", "loss")), {})
    return any(p.get("reduction") == "sum" for p in loss.get("placements", []))


# -- relations --------------------------------------------------------------------------------


def _error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference, relative to what is wanted."""
    norm = float(wanted.norm())
    away = float((actual - wanted).norm())
    return away / norm if norm > 0 else math.inf if away > 0 else 0.0


def _factor(actual: torch.Tensor, wanted: torch.Tensor, limit: float) -> float | None:
    """The number that `wanted` must be multiplied with to give `actual`."""
    square = float(wanted.square().sum())
    if square == 0:
        return None
    factor = float((actual * wanted).sum()) / square
    return factor if _error(actual, factor * wanted) <= limit or _is_zero(actual) else None


def _is_zero(tensor: torch.Tensor) -> bool:
    return not bool(tensor.any())


def _cause_of(
    output: str,
    wrong: list[_Share],
    shares: list[_Share],
    labels: list[int] | None,
    limit: float,
) -> CauseId | None:
    """What explains the gradients at the output of all shares that have wrong ones."""
    factors = [_factor(share.gradient, share.wanted, limit) for share in wrong]
    known = [factor for factor in factors if factor is not None]
    if len(known) == len(wrong):
        return _scaled(output, wrong, shares, known, labels, limit)
    shares = _without_common_factor(shares, limit)
    wrong = [share for share in shares if not _error(share.gradient, share.wanted) <= limit]
    about = {"ranks": _ranks_of(wrong)}
    by_micro = [_factors_of_micros(share, limit) for share in shares]
    weights = [of_share for of_share in by_micro if of_share is not None]
    if len(weights) == len(shares):
        return CauseId("loss_weights_of_micro_batches", about, {"weights": _told(shares, weights)})
    if any(_rounded(share) for share in wrong):
        return CauseId("loss_rounded_on_ranks", about, {"dtype": "bf16", "output": output})
    for relation in (_other_labels, _penalty, _smoothing, _other_tokens, _classes):
        causes = [relation(share, limit) for share in wrong]
        first = causes[0]
        if first is not None and all(c is not None and c.id == first.id for c in causes):
            numbers = _together([c.numbers for c in causes if c is not None])
            words = {**first.words, "output": output}
            return CauseId(first.id, {**about, **numbers}, words)
    words = {"output": output}
    if len(wrong) == len(shares):
        words["others"] = ". Does it have a term that depends on a rank's samples together?"
    return CauseId("loss_wrong_on_ranks", about, words)


def _without_common_factor(shares: list[_Share], limit: float) -> list[_Share]:
    """Divides by the factor that all shares have which have one.

    Where a rank counts other tokens, all ranks divide by another number of tokens.
    """
    found = [_factor(share.gradient, share.wanted, limit) for share in shares]
    factors = [factor for factor in found if factor]
    if not factors or max(factors) - min(factors) > limit * max(factors):
        return shares
    return [replace(share, gradient=share.gradient / factors[0]) for share in shares]


def _together(numbers: list[Any]) -> dict[str, float | list[int]]:
    """The numbers of several shares: counts are added, and of others the first one is named."""
    first = dict(numbers[0])
    for other in numbers[1:]:
        for name, value in other.items():
            if isinstance(value, int):
                first[name] += value
            elif name in ("least", "most"):
                first[name] = (min if name == "least" else max)(first[name], value)
    return first


def _ranks_of(shares: Sequence[_Share]) -> list[int]:
    return sorted(rank for share in shares for rank in share.ranks)


def _scaled(
    output: str,
    wrong: list[_Share],
    shares: list[_Share],
    factors: list[float],
    labels: list[int] | None,
    limit: float,
) -> CauseId | None:
    """Losses with one factor each; one that all ranks share the judge names itself."""
    is_common = len(wrong) == len(shares) and max(factors) - min(factors) <= limit * max(factors)
    if is_common:
        return _divided(factors[0], labels, limit)
    if _are_of_own_labels(factors, wrong, shares, labels, limit):
        return None  # a mean of the ranks' means, which has a cause of its own
    words = {"output": output}
    counts = {"data-parallel ranks": len(shares), "micro-batches": len(set(wrong[0].micros))}
    names = [
        name for name, count in counts.items() if count > 1 and _is_near(factors, count, limit)
    ]
    names += [
        f"1 / {name}"
        for name, count in counts.items()
        if count > 1 and _is_near(factors, 1 / count, limit)
    ]
    words |= {"is_formula": f" = {' or '.join(names)}"} if names else {}
    about: dict[str, Any] = {"ranks": _ranks_of(wrong), "factors": factors}
    return CauseId("loss_scaled_on_ranks", about, words)


def _is_near(factors: list[float], number: float, limit: float) -> bool:
    return all(abs(factor / number - 1) <= limit for factor in factors)


def _divided(factor: float, labels: list[int] | None, limit: float) -> CauseId | None:
    """Whether all ranks divide by the labels of one, where they count others."""
    if labels is None or len(set(labels)) == 1:
        return None
    total, size = sum(labels), len(labels)
    for rank, own in enumerate(labels):
        if own > 0 and abs(factor * size * own / total - 1) <= limit:
            numbers = {"scale": factor, "labels": own, "rank": rank, "all_labels": total}
            return CauseId("loss_divided_by_labels_of_rank", numbers)
    return None


def _are_of_own_labels(
    factors: list[float],
    wrong: list[_Share],
    shares: list[_Share],
    labels: list[int] | None,
    limit: float,
) -> bool:
    """Whether each share has divided by the number of its own labels."""
    if labels is None or not all(labels):
        return False
    right = [sum(labels) / (len(labels) * own) for own in labels]
    own = dict(zip(map(id, wrong), factors, strict=True))
    return all(
        abs(own.get(id(share), 1.0) / factor - 1) <= limit
        for share, factor in zip(shares, right, strict=True)
    )


def _factors_of_micros(share: _Share, limit: float) -> list[float] | None:
    """One factor for each micro-batch, if each has one."""
    found = []
    for micro in sorted(set(share.micros)):
        rows = share.rows_of(micro)
        if _is_zero(share.wanted[rows]) and _is_zero(share.gradient[rows]):
            found.append(1.0)
            continue
        factor = _factor(share.gradient[rows], share.wanted[rows], limit)
        if factor is None:
            return None
        found.append(factor)
    return found


def _told(shares: list[_Share], weights: list[list[float]]) -> str:
    """The weights of the micro-batches of each rank, in words."""
    return "; ".join(
        f"factors {', '.join(f'{weight:.4g}' for weight in of_share)} on rank {share.ranks[0]}"
        for share, of_share in zip(shares, weights, strict=True)
    )


def _rounded(share: _Share) -> bool:
    """Whether a gradient has the bits of bfloat16, and the wanted one more."""
    own, wanted = (t.bfloat16().double() for t in (share.raw, share.wanted))
    return torch.equal(own, share.raw) and not torch.equal(wanted, share.wanted)


@dataclass(frozen=True)
class _Entropy:
    """The gradient of a cross-entropy as rows: weight x (softmax - target), smoothed or not."""

    weights: torch.Tensor  # of each row; 0 where its token does not count
    labels: torch.Tensor
    smoothing: float
    apart: torch.Tensor  # softmax - target, without smoothing
    spread: torch.Tensor  # what smoothing adds to that for each unit of it

    @property
    def counts(self) -> torch.Tensor:
        """Which tokens count."""
        return self.weights != 0


def _entropy(gradient: torch.Tensor, logits: torch.Tensor, limit: float) -> _Entropy | None:
    """The gradient as that of a cross-entropy of the logits; None if it is no such gradient."""
    size = logits.shape[-1]
    if size < 3 or _is_zero(gradient):
        return None
    labels = gradient.argmin(-1)
    target = torch.nn.functional.one_hot(labels, size).double()
    apart, spread = logits.softmax(-1) - target, target - 1 / size
    # Two unknowns for each row: its weight, and its weight times the smoothing.
    aa, ab, bb = ((x * y).sum(-1) for x, y in ((apart, apart), (apart, spread), (spread, spread)))
    ga, gb = (gradient * apart).sum(-1), (gradient * spread).sum(-1)
    determinant = aa * bb - ab * ab
    weights = (ga * bb - gb * ab) / determinant
    smoothed = (gb * aa - ga * ab) / determinant
    counts = gradient.any(-1)
    weights, smoothed = (torch.where(counts, x, torch.zeros_like(x)) for x in (weights, smoothed))
    smoothing = float(smoothed.sum() / weights.sum())
    fitted = weights[:, None] * (apart + smoothing * spread)
    if not _error(fitted, gradient) <= 4 * limit:
        return None
    smoothing = 0.0 if abs(smoothing) <= limit else smoothing
    return _Entropy(weights, labels, smoothing, apart, spread)


def _other_labels(share: _Share, limit: float) -> CauseId | None:
    """Whether both are cross-entropies, of other labels."""
    wanted = _entropy(share.wanted, share.wanted_output, limit)
    actual = _entropy(share.gradient, share.output, limit)
    if wanted is None or actual is None:
        return None
    both = wanted.counts & actual.counts
    wrong = int((both & (wanted.labels != actual.labels)).sum())
    if wrong <= _FEW * int(both.sum()):
        return None
    words = {}
    if len(share.shape) > 1 and (moved := _moved(share, wanted, actual)):
        further = "further on" if moved > 0 else "further back"
        words["moved"] = f", those {abs(moved)} position{'s' * (abs(moved) > 1)} {further}"
    return CauseId("loss_of_other_labels", {"wrong": wrong, "tokens": int(both.sum())}, words)


def _moved(share: _Share, wanted: _Entropy, actual: _Entropy) -> int:
    """By how many positions the labels are moved; 0 where they are not."""
    length = share.shape[-1]
    views = [t.reshape(-1, length) for t in (wanted.labels, wanted.counts, actual.labels)]
    labels, counts, own = views
    is_own = actual.counts.reshape(-1, length)
    for by in (by for size in range(1, _MOST_MOVED + 1) for by in (size, -size)):
        there = labels.roll(-by, 1)
        both = counts.roll(-by, 1) & is_own
        if by > 0:
            both[:, length - by :] = False
        else:
            both[:, :-by] = False
        if bool(both.any()) and bool((there == own)[both].all()):
            return by
    return 0


def _penalty(share: _Share, limit: float) -> CauseId | None:
    """Whether there is a z-loss, too, over all tokens or those that count."""
    away = share.gradient - share.wanted
    slope = share.output.logsumexp(-1, keepdim=True) * share.output.softmax(-1)
    for rows in (slice(None), share.wanted.any(-1)):
        if _factor(away[rows], slope[rows], 4 * limit):
            return CauseId("loss_penalizes_logits")
    return None


def _smoothing(share: _Share, limit: float) -> CauseId | None:
    wanted = _entropy(share.wanted, share.wanted_output, limit)
    actual = _entropy(share.gradient, share.output, limit)
    if wanted is None or actual is None or not torch.equal(wanted.counts, actual.counts):
        return None
    if abs(wanted.smoothing - actual.smoothing) <= 4 * limit:
        return None
    numbers = {"smoothing": actual.smoothing, "right": wanted.smoothing}
    return CauseId("loss_with_other_smoothing", numbers)


def _other_tokens(share: _Share, limit: float) -> CauseId | None:
    """Whether other tokens count, and those that count on both sides have one factor."""
    own, wanted = share.gradient.any(-1), share.wanted.any(-1)
    both = own & wanted
    if torch.equal(own, wanted) or not bool(both.any()):
        return None
    if _factor(share.gradient[both], share.wanted[both], limit) is None:
        return None
    more, fewer = int((own & ~wanted).sum()), int((wanted & ~own).sum())
    return CauseId("loss_of_other_tokens", {"more": more, "fewer": fewer})


def _classes(share: _Share, limit: float) -> CauseId | None:
    """Whether each class of labels has a factor of its own."""
    wanted = _entropy(share.wanted, share.wanted_output, limit)
    if wanted is None or not torch.equal(share.gradient.any(-1), share.wanted.any(-1)):
        return None
    factors = []
    for label in wanted.labels[wanted.counts].unique():
        rows = wanted.counts & (wanted.labels == label)
        factor = _factor(share.gradient[rows], share.wanted[rows], 4 * limit)
        if factor is None:
            return None
        factors.append(factor)
    return CauseId("loss_weights_of_classes", {"least": min(factors), "most": max(factors)})


def _term_beside(
    output: str, shares: list[_Share], whole: float, is_sum: bool, limit: float
) -> CauseId | None:
    """Whether the loss of some ranks has a term that does not depend on the output.

    The gradient there is right, so it is that of a cross-entropy if the single process's is one,
    which shows each rank's part of the loss.
    """
    own = [_part_of_loss(share, limit) for share in shares]
    parts = [part for part in own if part is not None]
    if len(parts) < len(shares):
        return None
    beside = whole - sum(parts)  # of a loss in one process
    scale = 1 if is_sum else len(shares)
    expected = [scale * part + (beside / len(shares) if is_sum else beside) for part in parts]
    offsets = [share.loss - right for share, right in zip(shares, expected, strict=True)]
    wrong = [
        share
        for share, offset, right in zip(shares, offsets, expected, strict=True)
        if abs(offset) > limit * abs(right)
    ]
    if not wrong or len(wrong) == len(shares):
        return None
    offset = next(o for share, o in zip(shares, offsets, strict=True) if share is wrong[0])
    numbers: dict[str, Any] = {"ranks": _ranks_of(wrong), "offset": offset}
    return CauseId("loss_term_beside_output", numbers, {"output": output})


def _part_of_loss(share: _Share, limit: float) -> float | None:
    """What the tokens of a share add to the loss of one process."""
    found = _entropy(share.wanted, share.wanted_output, limit)
    if found is None:
        return None
    logs = -share.wanted_output.log_softmax(-1)
    of_label = logs.gather(-1, found.labels[:, None])[:, 0]
    smoothed = (1 - found.smoothing) * of_label + found.smoothing * logs.mean(-1)
    return float((found.weights * smoothed).sum())
