# SPDX-License-Identifier: Apache-2.0
"""What was not restored, where a resumed run differs from the uninterrupted one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from . import _bundle
from ._auto import notes_folder
from ._course import Steps, course_file
from ._data import Cause
from ._rank_by_rank import Name, Step, same_bits, world_size_of

#: Kind and name of what the judge compares first.
_EARLIEST = ("scalar", "learning_rate")


@dataclass(frozen=True)
class Sides:
    """An uninterrupted run, recorded from step `at` on, and the one that was resumed there."""

    at: int
    uninterrupted: Path
    resumed: Path
    before: list[Steps]  # of each rank, what the steps of the uninterrupted run began with
    begun: list[Steps]  # of each rank, what the resumed run began with

    @staticmethod
    def of(uninterrupted: Path, resumed: Path, at: int) -> Sides:
        """From the bundles and what the ranks have left beside them."""
        size = world_size_of(uninterrupted)
        before, begun = (courses_of(bundle, size) for bundle in (uninterrupted, resumed))
        return Sides(at, uninterrupted, resumed, before, begun)


def courses_of(bundle: Path, world_size: int) -> list[Steps]:
    """What each rank of a run has seen of the steps before it was recorded, or stopped."""
    logs = notes_folder(bundle)
    return [Steps.read(course_file(logs, rank)) for rank in range(world_size)]


@dataclass(frozen=True)
class Unrestored:
    """Something that a resumed run has of another step, or anew.

    `what`: everything, data, weights, learning_rate, random_state, optimizer or end. `step`: the
    step of the training that it is of; None where it is of none.
    """

    what: str
    step: int | None
    cause: Cause


def unrestored(sides: Sides) -> list[Unrestored]:
    """What is found to be of another step, each beside the first record that shows it."""
    size = len(sides.before)
    wanted, actual = (Step.read(bundle, 0, size) for bundle in (sides.uninterrupted, sides.resumed))
    if cause := _about_all(sides):
        return [cause]
    return [
        *_about_inputs(sides, wanted, actual),
        *_about_weights(sides, wanted, actual),
        *_about_rates(sides),
        *_about_draws(sides, wanted, actual),
        *_about_optimizers(sides, wanted, actual),
        *_about_end(sides),
    ]


def _about_all(sides: Sides) -> Unrestored | None:
    """Whether weights and samples of all ranks are those of one earlier step."""
    steps = set(range(sides.at))
    for before, begun in zip(sides.before, sides.begun, strict=True):
        own = begun.inputs[0]
        steps &= {
            step
            for step in steps
            if before.weights[step] == begun.weights[0] and before.inputs[step][: len(own)] == own
        }
    if not steps:
        return None
    text = (
        f"the second start begins with the weights and samples of step {max(steps)}, not of step "
        f"{sides.at}: it has loaded an older checkpoint. If the script does not save after "
        f"{sides.at} steps, give --resume-at the number of steps after which it does"
    )
    if 0 in steps:
        text = (
            "the second start begins with the weights and samples of step 0: the script did not "
            "resume, because it looked for no checkpoint or found none"
        )
    return Unrestored("everything", max(steps), Cause(0, *_EARLIEST, text))


def _different(wanted: Step, actual: Step, kind: str) -> Iterator[tuple[int, Name]]:
    """Ranks and records of a kind that both sides have, with other values."""
    for name in wanted.names():
        if name[0] != kind:
            continue
        for rank in range(len(wanted.records)):
            a, b = wanted.tensor(rank, name), actual.tensor(rank, name)
            if a is not None and b is not None and not same_bits(a, b):
                yield rank, name


def _about_inputs(sides: Sides, wanted: Step, actual: Step) -> Iterator[Unrestored]:
    first = next(_different(wanted, actual, "data_id"), None)
    if first is None:
        return
    rank, (kind, name, _) = first
    own = sides.begun[rank].inputs[0]
    steps = [
        step
        for step, inputs in enumerate(sides.before[rank].inputs[: sides.at])
        if inputs[: len(own)] == own
    ]
    for step in _bundle.read_manifest(sides.uninterrupted)["steps"][1:]:
        later = _bundle.read_some_tensors(sides.uninterrupted, step, rank, "data_id/")
        theirs = {k: t for k, t in actual.tensors[rank].items() if k.startswith("data_id/")}
        if later.keys() == theirs.keys() and all(same_bits(later[k], theirs[k]) for k in later):
            steps.append(sides.at + step)
    if steps:
        text = (
            f"the resumed run trains on the samples of step {steps[-1]} where those of step "
            f"{sides.at} are due: the position in the data was not restored, or the epoch of its "
            "order"
        )
    else:
        text = (
            "the resumed run trains on samples of no step of the uninterrupted run: the order of "
            "samples was not restored (the sampler's seed or state), or its skipped batches are "
            "those of another order"
        )
    step_read = steps[-1] if steps else None
    yield Unrestored("data", step_read, Cause(0, kind, name, text))


def _about_weights(sides: Sides, wanted: Step, actual: Step) -> Iterator[Unrestored]:
    as_read = [(r, n) for r, n in _different(wanted, actual, "param") if n[2] == 0]
    if not as_read:
        return
    rank, (kind, name, _) = as_read[0]
    before, own = sides.before[rank].weights, sides.begun[rank].weights[0]
    steps = [step for step, weights in enumerate(before[: sides.at]) if weights == own]
    stale = [n for n in own if own[n] == before[0].get(n) != before[sides.at].get(n)]
    if 0 in steps:
        text = (
            "the resumed run begins with the weights of step 0, though not with its samples: "
            "nothing was loaded into the model. Does the checkpoint have other names, such as "
            "module.NAME, which strict=False leaves out?"
        )
    elif steps:
        text = (
            f"the resumed run begins with the weights of step {steps[-1]} where those of step "
            f"{sides.at} are due: they were saved too early, or by another step's name"
        )
    elif stale:
        text = (
            f"{len(stale)} of {len(own)} trained weights, such as {stale[0]}, are those that the "
            "uninterrupted run began with: the checkpoint was not loaded into them"
        )
    else:
        text = "the resumed run begins with weights of no step of the uninterrupted run"
    step = steps[-1] if steps else (0 if stale else None)
    yield Unrestored("weights", step, Cause(0, kind, name, text))


def _about_rates(sides: Sides) -> Iterator[Unrestored]:
    name = "scalar/learning_rate"
    steps = [_bundle.read_manifest(b)["steps"] for b in (sides.uninterrupted, sides.resumed)]
    for step in (s for s in steps[0] if s in steps[1]):
        wanted, actual = (
            _bundle.read_some_tensors(bundle, step, 0, name).get(f"{name}/0")
            for bundle in (sides.uninterrupted, sides.resumed)
        )
        if wanted is None or actual is None or same_bits(wanted, actual):
            continue
        rate = float(actual)
        known = [i for i, other in enumerate(sides.before[0].rates) if other == rate]
        whose = f", as in step {known[-1]}" if known else ""
        text = (
            f"the learning rate is {rate:g}{whose}, where step {sides.at + step} has "
            f"{float(wanted):g}: the scheduler or the optimizer's groups, which have the rate, "
            "were not restored"
        )
        of_step = known[-1] if known else None
        cause = Cause(step, "scalar", "learning_rate", text)
        yield Unrestored("learning_rate", of_step, cause)
        return


def _about_end(sides: Sides) -> Iterator[Unrestored]:
    wanted, actual = (
        _bundle.read_manifest(bundle)["steps"] for bundle in (sides.uninterrupted, sides.resumed)
    )
    missing = sorted(set(wanted) - set(actual))
    if missing:
        text = (
            f"the resumed run ends before step {sides.at + missing[0]}, which the uninterrupted "
            "run makes"
        )
        yield Unrestored("end", sides.at + missing[0], Cause(missing[0], *_EARLIEST, text))


def _about_draws(sides: Sides, wanted: Step, actual: Step) -> Iterator[Unrestored]:
    first = next(_different(wanted, actual, "activation"), None)
    if first is None or not sides.begun[0].has_dropout:
        return
    rank, (kind, name, _) = first
    if sides.before[rank].random[sides.at] == sides.begun[rank].random[0]:
        return
    text = (
        f"the state of random numbers on rank {rank} is not that of step {sides.at}, and the model "
        "has dropout: the generators' state was not restored"
    )
    yield Unrestored("random_state", None, Cause(0, kind, name, text))


def _about_optimizers(sides: Sides, wanted: Step, actual: Step) -> Iterator[Unrestored]:
    different = list(_different(wanted, actual, "optimizer"))
    states = [(r, n) for r, n in different if not n[1].endswith((".hyperparameters", ".buffer"))]
    if not states:
        return
    _, (kind, name, _) = states[0]
    counts = [(r, n) for r, n in states if n[1].endswith(".step")]
    for rank, count in counts[:1]:
        made, due = (_number(side.tensor(rank, count)) for side in (actual, wanted))
        text = (
            f"the optimizer counts {made} steps after this one, where that of the uninterrupted "
            f"run counts {due} ({count[1]}): its state was not restored"
        )
        yield Unrestored("optimizer", None, Cause(0, kind, name, text))
    fresh = [n for r, n in states if _is_fresh(actual, r, n)]
    if not counts and fresh:
        text = f"{fresh[0][1]} is the gradient of this step alone: the state was not loaded"
        yield Unrestored("optimizer", None, Cause(0, kind, name, text))


def _is_fresh(step: Step, rank: int, state: Name) -> bool:
    """Whether a momentum is what SGD begins with."""
    parameter, _, what = state[1].rpartition(".")
    gradient, own = step.tensor(rank, ("grad", parameter, 0)), step.tensor(rank, state)
    if what != "momentum_buffer" or gradient is None or own is None:
        return False
    return same_bits(gradient, own)


def _number(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else int(tensor.max())
