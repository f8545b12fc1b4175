# SPDX-License-Identifier: Apache-2.0
"""Names a mean of the ranks' means, where one process takes the mean over all labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import _bundle
from ._data import Cause, CauseId
from ._sample_sets import heads_of, mesh_of_bundle

_RANK_LOSS = "scalar/loss_per_dp_rank"
#: How much nearer a weighted mean must be to be the cause.
_CLEARLY = 0.01


@dataclass(frozen=True)
class _Share:
    """Labels and losses of a rank's forward passes in one step; losses add up to the rank's."""

    labels: list[int]
    losses: list[float]


def mean_of_means(reference: Path, run: Path, step: int) -> list[Cause]:
    """Whether the mean of the ranks' losses is wrong, and right if weighted by their labels."""
    wanted = _bundle.read_some_tensors(reference, step, 0, "scalar/").get("scalar/loss/0")
    if wanted is None:
        return []
    whole = float(wanted)
    for shares in _readings(run, step):
        error = abs(sum(sum(s.losses) for s in shares) / len(shares) - whole)
        counts = [sum(s.labels) for s in shares]
        is_near = any(abs(mean - whole) < _CLEARLY * error for mean in _weighted_means(shares))
        if is_near and any(s.labels != shares[0].labels for s in shares):
            cause = CauseId("mean_of_own_labels", {"least": min(counts), "most": max(counts)})
            return [Cause(step, "scalar", "loss", cause)]
    return []


def _weighted_means(shares: list[_Share]) -> Iterator[float]:
    """The loss over all labels: of each micro-batch, and of all micro-batches together."""
    if len({len(s.labels) for s in shares}) == 1:
        passes = list(zip(*(zip(s.labels, s.losses, strict=True) for s in shares), strict=True))
        if all(sum(count for count, _ in of_ranks) > 0 for of_ranks in passes):
            yield sum(
                sum(count * loss for count, loss in of_ranks) / sum(count for count, _ in of_ranks)
                for of_ranks in passes
            )
    total = sum(sum(s.labels) for s in shares)
    if total > 0:  # each loss was divided by the number of its rank's passes
        yield (
            sum(
                len(s.labels) * count * loss
                for s in shares
                for count, loss in zip(s.labels, s.losses, strict=True)
            )
            / total
        )


def _readings(run: Path, step: int) -> Iterator[list[_Share]]:
    """The shares as the losses of torch counted labels, or else as inputs may be labels."""
    heads = heads_of(mesh_of_bundle(run))
    contents = [_bundle.read_records(run, step, rank) for rank in heads]
    counted = [_Share(c.get("labels", []), c.get("losses", [])) for c in contents]
    if all(s.labels and len(s.labels) == len(s.losses) for s in counted):
        yield counted
        return
    losses = [_bundle.read_some_tensors(run, step, rank, _RANK_LOSS) for rank in heads]
    if not all(f"{_RANK_LOSS}/0" in loss for loss in losses):
        return
    inputs = [_bundle.read_some_tensors(run, step, rank, "data_id/") for rank in heads]
    names = [n for n, t in inputs[0].items() if not t.is_floating_point() and bool((t < 0).any())]
    # The first label of a sample may have nothing that predicts it.
    for name, first in ((name, first) for name in names for first in (0, 1)):
        if all(name in of_rank for of_rank in inputs):
            labels = [t[name][..., first if t[name].ndim > 1 else 0 :] for t in inputs]
            yield [
                _Share([int((own >= 0).sum())], [float(loss[f"{_RANK_LOSS}/0"])])
                for own, loss in zip(labels, losses, strict=True)
            ]
