# SPDX-License-Identifier: Apache-2.0
"""Level 1: one line around the training step."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from . import _float64
from ._bundle import tables
from ._checks import outside_parameters, switch_dropout_off
from ._deepspeed import EngineHooks, is_engine, perturb_engine
from ._generic import move_recorded
from ._hooks import Hooks
from ._megatron import MegatronHooks, is_megatron_optimizer, perturb_megatron
from ._mesh import MeshLike
from ._names import unwrapped
from ._options import Layout, Options, Rename, Transform
from ._perturb import perturb as move_weights
from ._pipeline import PipelineHooks, Stages, is_schedule
from ._presets import with_preset
from ._recorder import Recorder
from .errors import UsageError


@contextmanager
def record(
    directory: str | os.PathLike[str],
    model: torch.nn.Module | Any,
    optimizer: Any = None,
    *,
    mesh: MeshLike = None,
    steps: int | None = None,
    rename: Rename | None = None,
    layouts: Mapping[str, Layout] | None = None,
    transform: Transform | None = None,
    not_recorded: Mapping[str, str] | None = None,
    perturb: int | None = None,
    no_dropout: bool = False,
    generic_weights: bool = False,
    activations: bool = True,
    grad_scale: float | None = None,
    loss_reduction: str = "avg",
    allow_draws: bool = False,
    preset: str = "auto",
    keep: str = "everything",
    reference: str | os.PathLike[str] | None = None,
    only: Sequence[str] = (),
    at_steps: Sequence[int] = (),
    training: Mapping[str, Any] | None = None,
    judging: Mapping[str, Any] | None = None,
    subject: str = "pytorch",
    case: str = "training step",
    precision: str | None = None,
) -> Iterator[Recorder]:
    """Records the training steps inside the `with` block as a bundle.

    All ranks call it (collective where torch.distributed is initialized: ranks agree on a name).

    Args:
        directory: the bundle's folder; an older bundle there is replaced.
        model: the model as it is called, with its wrapper (DDP, FSDP2, DTensor, ...), or a
            schedule of torch.distributed.pipelining.
        optimizer: the optimizer that steps it, or several, or Megatron-Core's; None for a
            DeepSpeed engine.
        mesh: "dp=2,tp=2", a mapping, or a DeviceMesh with names, from the slowest axis to the
            fastest. None: data parallelism over all ranks.
        steps: stop recording after so many optimizer steps; None: all in the block.
        rename: a function or mapping from the model's names to the reference's.
        layouts: KIND/NAME patterns to "infer", "replicate", {"tp": 0} or {"tp": "sum"}.
        transform: called with (kind, name, tensor); returns the tensor to record, several by
            name, or None.
        not_recorded: KIND/NAME patterns that are left out, with the reason.
        perturb: moves every weight by one ulp first, at random from this seed (runs that show
            how far a reference moves by roundings).
        no_dropout: sets every dropout probability to 0 first.
        generic_weights: moves all weights at random first, in all layouts alike: no norm weight is
            1 and no bias 0. Plain tensors that are parts of a parameter need `layouts`. For models
            that a torch optimizer steps.
        activations: False records no activations and their gradients.
        grad_scale: the factor on activation gradients; None: the number of data-parallel ranks,
            over which frameworks average, or 1 if loss_reduction is "sum".
        loss_reduction: how the ranks' losses make the loss of the step: "avg" or "sum".
        allow_draws: accept a forward pass that draws random numbers: they change no value, or
            all layouts draw the same.
        preset: "megatron" or "transformers": places that layers of Megatron-Core and of
            transformers' tensor-parallel plans have; "auto": if the model is one of these;
            "none".
        keep: "everything", or "what_differs": each rank compares its tensors with `reference` while
            it runs; what agrees leaves its statistics, a digest and samples.
        reference: the bundle of one process to compare with, with its responses. With `perturb`,
            the bundle whose frozen tables of 16 bits stay as they are, as they round nothing.
        only: KIND/NAME patterns of what is recorded; all if there are none. Data ids always are.
        at_steps: numbers of the optimizer steps that are recorded, from 0; all if there are none.
        training: further settings that both runs must share.
        judging: settings by which this bundle, as a reference, has others judged.
        subject: who is judged, for the report.
        case: on what, for the report.
        precision: "native" or "float64", as this process must be (isoshard.enter_float64 begins
            the latter); None: as it is.

    Example::

        with isoshard.record("runs/mine", model, optimizer, mesh={"dp": 2}):
            train_step()
    """
    _require_precision(precision)
    options = Options(
        rename=rename,
        layouts=layouts or {},
        transform=transform,
        not_recorded=not_recorded or {},
        training=training or {},
        judging=judging or {},
        activations=activations,
        grad_scale=grad_scale,
        loss_reduction=loss_reduction,
        allow_draws=allow_draws,
        preset=preset,
        only=only,
        at_steps=at_steps,
    )
    is_compared = keep == "what_differs"
    is_unused = bool(reference) and not is_compared and perturb is None
    is_missing = is_compared and not reference
    if keep not in ("everything", "what_differs") or is_unused or is_missing:
        raise UsageError(
            'keep must be "everything", or "what_differs" with the reference= to compare with, got '
            f"{keep!r} and {reference!r}."
        )
    model = Stages(model) if is_schedule(model) else model
    if no_dropout:
        switch_dropout_off(unwrapped(model))
    if generic_weights:
        has_copies = is_engine(model) or is_megatron_optimizer(optimizer)
        move_recorded(model, has_copies=has_copies, options=options, mesh=mesh)
    if perturb is not None:
        frozen = tables(Path(reference)) if reference else ()
        if is_engine(model):
            perturb_engine(model, perturb, frozen)
        elif is_megatron_optimizer(optimizer):
            perturb_megatron(model, [optimizer], perturb, frozen)
        else:
            plain = unwrapped(model)
            move_weights(plain, perturb, outside_parameters(plain, _list_of(optimizer)), frozen)
    recorder = Recorder(
        directory,
        mesh=mesh,
        subject=subject,
        case=case,
        options=with_preset(options, model),
        compare_with=reference if is_compared else None,
        purpose="judged" if perturb is None else "response",
    )
    hooks: Hooks
    if is_engine(model):
        hooks = EngineHooks(recorder, model, max_steps=steps)
    elif isinstance(model, Stages):
        hooks = PipelineHooks(recorder, model, _list_of(optimizer), max_steps=steps)
    elif is_megatron_optimizer(optimizer):
        hooks = MegatronHooks(recorder, model, [optimizer], max_steps=steps)
    else:
        hooks = Hooks(recorder, model, _list_of(optimizer), max_steps=steps)
    try:
        yield recorder
        hooks.finish()
    finally:
        hooks.detach()
    recorder.finish()


def enter_float64() -> None:
    """Turns this process into one that computes in float64, for good (docs/reference/precision.md).

    It must come before the model and its data are made, best right after `import torch`: what is
    imported later is imported with the real dtypes, as it has to be.
    """
    _float64.enter()


def _require_precision(wanted: str | None) -> None:
    is_now = "float64" if _float64.is_on() else "native"
    if wanted is None or wanted == is_now:
        return
    if wanted == "float64":
        raise UsageError(
            'precision="float64" must be that of the process, got a native one. Call '
            "isoshard.enter_float64() right after import torch, or use isoshard judge."
        )
    raise UsageError(
        f'precision must be "{is_now}", as this process is, got {wanted!r}: one run is recorded at '
        "a time. Record again in another process, or use isoshard judge."
    )


def _list_of(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        raise UsageError("An optimizer must be given with a model that is no DeepSpeed engine.")
    several = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    return [_inside(o) for o in several]


def _inside(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that steps, inside one that only passes calls on (accelerate's prepare)."""
    while type(optimizer).__module__.split(".")[0] == "accelerate":
        optimizer = optimizer.optimizer
    found: torch.optim.Optimizer = optimizer
    return found
