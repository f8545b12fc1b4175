# SPDX-License-Identifier: Apache-2.0
"""Collects what a step computed, and writes it as a bundle."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import _bundle, _settings
from ._arena import Arena
from ._bundle import Entry
from ._call_sites import CallSites
from ._calls import journal_of_recorder
from ._closer import FunctionTaps
from ._dtensor import Place, axes_of_mesh_dims, is_dtensor, local_of, place_of
from ._dtypes import Dtypes
from ._filters import Filter
from ._inputs import as_real
from ._label_counts import LabelCounts
from ._mesh import ALIASES, DATA_AXES, MeshLike, mesh_of
from ._micro_batches import merged, passes_of
from ._options import Layout, Options
from ._replay import Replay
from ._safetensors import dtype_name
from ._what_differs import WhatDiffers
from .errors import RecordError, UsageError

_SAMPLE_KINDS = ("activation", "activation_grad", "data_id")
#: Scalars that are recorded with the gradients.
_OF_GRADIENTS = [("scalar", name) for name in ("loss", "loss_per_dp_rank", "grad_norm")]
_WAIT_VARIABLE = "ISOSHARD_WAIT_SECONDS"
#: How long rank 0 waits for others to say that they are done, after all their files are there.
_GRACE_SECONDS = 5.0
#: How long a rank that has made no step waits for the others' end: they may wait for it.
_IDLE_SECONDS = 10.0


def world() -> tuple[int, int]:
    """(rank, world size) of this process, also where torch.distributed is not initialized."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    for rank, size in (
        ("RANK", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
    ):
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def _check_world_size(size: int) -> None:
    """Two worlds of other sizes would write the files of the same rank."""
    asked = os.environ.get("WORLD_SIZE", "")
    if dist.is_available() and dist.is_initialized() and asked.isdecimal() and int(asked) != size:
        raise RecordError(
            f"torch.distributed must have the {asked} processes that the launcher started "
            f"(WORLD_SIZE), got {size}. Let the script pass the launcher's RANK and WORLD_SIZE on "
            "to init_process_group."
        )


def _wait_seconds() -> float:
    """How long a rank waits for the files of others."""
    text = os.environ.get(_WAIT_VARIABLE, "120")
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{_WAIT_VARIABLE} must be seconds, got {text!r}.") from None


@dataclass(frozen=True)
class FlatPart:
    """A place: a run of the flattened tensor of this shape, from `begin` on."""

    shape: list[int]
    begin: int


class Recorder:
    """Collects the records of one rank and writes them, step by step.

    It knows tensors, names and places. What is recorded when is up to the hooks
    (isoshard._hooks), or to a program that calls `put` and `scalar` itself.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        mesh: MeshLike = None,
        subject: str = "pytorch",
        case: str = "training step",
        options: Options | None = None,
        compare_with: str | os.PathLike[str] | None = None,
        purpose: str = "judged",
    ) -> None:
        """`compare_with` is a reference: what agrees with it is not kept (_what_differs)."""
        self.directory = Path(directory)
        self.options = options or Options()
        #: Whether this run shows how far right runs may differ, and is not judged itself.
        self.is_response = purpose == "response"
        self.filter = Filter(self.options.only, self.options.at_steps)
        self.rank, self.world_size = world()
        _check_world_size(self.world_size)
        self.mesh = mesh_of(mesh, self.world_size)
        self.subject, self.case = subject, case
        self.training: dict[str, Any] = {}
        self.judging: dict[str, Any] = {}
        self.dtypes = Dtypes()
        self.not_recorded: dict[str, str] = dict(self.options.not_recorded)
        self.stage: int | None = None  # the coordinate on pp, where this rank holds some layers
        self.step = 0
        self.steps: list[int] = []
        #: Steps whose learning rate was 0.
        self.idle_steps = 0
        self.active = True
        self._calls: dict[tuple[str, str], int] = {}
        self._axes_of: dict[Any, list[list[str]]] = {}  # by DeviceMesh
        self._entries: list[Entry] = []
        self._arena = Arena()
        self._is_prepared = False
        self._unread = 0  # forward passes of the current step that were forgotten
        self._unfinished = 0  # backward passes of a step that the script has not made
        self.backward_passes = 0  # since the step before, also those whose gradients were cleared
        self.has_no_gradients = False  # whether the current step was made without any
        self._passes: dict[str, list[tuple[int, int]]] = {}  # of the current step's inputs
        self.sites = CallSites()
        self.labels = LabelCounts()
        self.losses: list[float] = []  # of the current step's backward passes
        self.buffers: dict[str, dict[str, Any]] = {}  # which the recording begins with
        # Set before hooks are attached:
        self.replay: Replay | None = None
        self.functions: FunctionTaps | None = None
        #: Whether norms are recorded that the script computes itself; _settle must see the bundle.
        self.takes_own_norms = False
        self.has_own_norm = False  # whether the current step has one
        self.scaled: dict[str, float] = {}  # factors of its gradients (GradientWatch.scaled)
        self._is_updated = False  # whether the current step has been made
        self._journal: dict[str, Any] | None = None  # of the current step, once it has been made
        self.run = self._agree_on_run()
        self.comparison: WhatDiffers | None = None
        if compare_with is not None:
            self.comparison = WhatDiffers(
                Path(compare_with),
                rank=self.rank,
                mesh=self.mesh,
                run=self.run,
                purpose=purpose,
            )
        self.journal = journal_of_recorder()

    # -- records -----------------------------------------------------------------------------

    def put(
        self,
        kind: str,
        name: str,
        value: torch.Tensor,
        *,
        layout: Layout | FlatPart | None = None,
        grad_scale: float = 1.0,
        micro: int | None = None,
        call: int | None = None,
        is_final: bool = False,
        ending: str = "",
    ) -> None:
        """Records a tensor; `layout` is what is known of its place if it is no DTensor.

        `ending` is added to the name of the record. The options and filters go by `name` alone.
        `is_final`: nothing changes it before the step ends, so that it is not copied.
        Tensors of several micro-batches (`micro`) with the same name and call become one record
        at the end of the step (isoshard._micro_batches).
        """
        if not self.active or self.options.is_left_out(kind, name):
            return
        if self.filter.drops(kind, name, self.step, (kind, name) not in self._calls):
            return
        with torch.no_grad():
            if value.is_complex() and not is_dtensor(value):
                value = as_real(value)
            if self.options.transform is not None:
                result = self.options.transform(kind, name, value.detach())
                if result is None:
                    return
                if isinstance(result, Mapping):
                    for part, tensor in result.items():
                        self._add(
                            kind, part, tensor, layout, grad_scale, micro, call, False, ending
                        )
                    return
                value = result
            tensor = value.detach()
            self._add(kind, name, tensor, layout, grad_scale, micro, call, is_final, ending)

    def scalar(self, name: str, value: Any, *, layout: Layout = "replicate") -> None:
        """Records a number, in fp64."""
        tensor = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        if isinstance(value, float):
            tensor = torch.tensor(value, dtype=torch.float64)
        self.put("scalar", name, local_of(tensor).to(torch.float64).reshape(1), layout=layout)

    def number(self, name: str, value: torch.Tensor) -> None:
        """Records numbers of a parameter's optimizer as they are: no transform is for them."""
        is_first = ("optimizer", name) not in self._calls
        if not self.filter.drops("optimizer", name, self.step, is_first):
            self._add("optimizer", name, value, "replicate", 1.0, None, None, False)

    def learning_rate(self, rate: float | None) -> None:
        """Records a step's learning rate, if its optimizer has one."""
        if rate is not None:
            self.scalar("learning_rate", rate)
            self.idle_steps += rate == 0

    def _add(
        self,
        kind: str,
        name: str,
        value: torch.Tensor,
        layout: Layout | FlatPart | None,
        grad_scale: float,
        micro: int | None,
        call: int | None,
        is_final: bool,
        ending: str = "",
    ) -> None:
        what = f"{kind}/{name}"
        is_number = kind == "optimizer" and layout == "replicate"  # it has no dim to be cut
        said = None if is_number else self.options.layout(kind, name)
        local = local_of(value)
        whole = name + ending
        if call is None:
            call = self._calls.get((kind, whole), 0)
        self._calls[(kind, whole)] = call + 1
        self.dtypes.see(kind, name, local.dtype)
        record: dict[str, Any] = {
            "kind": kind,
            "name": whole,
            "call": call,
            "dtype": dtype_name(local.dtype, what),
            "local_shape": list(local.shape),
        }
        if grad_scale != 1.0:
            record["grad_scale"] = grad_scale
        if isinstance(layout, FlatPart):
            local = self._place_flat(record, local, layout)
        elif said is not None:
            self.say(record, said)
        elif is_dtensor(value):
            self._place(record, kind, value, what)
        else:
            self.say(record, layout or "infer")
        if self.stage is not None and (kind != "scalar" or name.startswith("loss")):
            only = {"axis": "pp", "kind": "only_at", "coordinate": self.stage}
            record.setdefault("placements", []).append(only)
        entry = None
        if self.comparison is not None and micro is None:
            entry = self.comparison.offer(record, local, self.step)
        if entry is None:
            copied = local.to("cpu").contiguous() if is_final else self._arena.copy(local)
            entry = Entry(record, copied, micro)
        self._entries.append(entry)

    def say(self, record: dict[str, Any], layout: Layout) -> None:
        """Writes a layout in words: infer, replicate, or what each axis does."""
        shape = record["local_shape"]
        if self.world_size == 1 or layout == "replicate":
            record["global_shape"] = list(shape)
            return
        if isinstance(layout, str):
            record["layout"] = "infer"
            return
        whole = list(shape)
        placements: list[dict[str, Any]] = []
        for name, do in layout.items():
            axis = ALIASES.get(name, name)
            degree = self.mesh.axes.get(axis, 1)
            if degree == 1:
                continue
            if isinstance(do, str):
                placements.append({"axis": axis, "kind": "partial", "reduction": do})
            else:
                if do >= len(whole):
                    raise RecordError(
                        f"A layout must cut a dim that the tensor has, got dim {do} of "
                        f"{record['name']} with shape {shape}."
                    )
                whole[do] *= degree
                placements.append({"axis": axis, "kind": "shard", "dim": do})
        record["global_shape"], record["placements"] = whole, placements

    def _place(self, record: dict[str, Any], kind: str, value: Any, what: str) -> None:
        """Writes where a DTensor's local part lies."""
        place = place_of(value, what)
        if self.world_size == 1:
            record["global_shape"] = place.global_shape
            return
        if kind in _SAMPLE_KINDS and not place.partial:
            record["layout"] = "infer"  # its mesh may not say which samples these are
            return
        axes_of_dims = self._axes_of.get(value.device_mesh)
        if axes_of_dims is None:
            axes_of_dims = axes_of_mesh_dims(value.device_mesh, self.mesh, self.rank)
            self._axes_of[value.device_mesh] = axes_of_dims
        partial = [
            {"axis": axis, "kind": "partial", "reduction": reduction}
            for dim, reduction in place.partial
            for axis in axes_of_dims[dim]
        ]
        covered = {axis for axes in axes_of_dims for axis in axes}
        split = [
            axis
            for axis, degree in self.mesh.axes.items()
            if axis in DATA_AXES and degree > 1 and axis not in covered
        ]
        if kind in _SAMPLE_KINDS and split and value.ndim > 0:
            self._split_samples(record, place, split, partial)
            return
        record["global_shape"] = place.global_shape
        if partial:
            record["placements"] = partial
        if place.local_shape != place.global_shape or not partial:
            record["boxes"] = place.boxes

    def _place_flat(
        self, record: dict[str, Any], local: torch.Tensor, part: FlatPart
    ) -> torch.Tensor:
        """Writes which run of the flattened whole this is; one process has all of it."""
        record["global_shape"] = list(part.shape)
        if self.world_size == 1:
            record["local_shape"] = list(part.shape)
            return local.reshape(part.shape)
        count = local.numel()
        record["flat"] = []
        if count > 0:
            record["flat"] = [{"local_begin": 0, "global_begin": part.begin, "count": count}]
        return local

    def _split_samples(
        self,
        record: dict[str, Any],
        place: Place,
        split: list[str],
        partial: list[dict[str, Any]],
    ) -> None:
        """A DTensor of one tensor-parallel group: its samples are split over other axes."""
        samples, parts, index = place.global_shape[0], 1, 0
        coordinates = self.mesh.coordinates(self.rank)
        for axis in split:
            parts *= self.mesh.axes[axis]
            index = index * self.mesh.axes[axis] + coordinates[axis]
        record["global_shape"] = [samples * parts, *place.global_shape[1:]]
        boxes = place.boxes
        for box in boxes:
            box["global_offset"][0] += index * samples
        record["boxes"] = boxes
        if partial:
            record["placements"] = partial

    @property
    def grad_scale(self) -> float:
        """What activation gradients are multiplied with against the true ones."""
        if self.options.grad_scale is not None:
            return self.options.grad_scale if self.world_size > 1 else 1.0
        if self.options.loss_reduction == "sum":
            return 1.0
        return float(self.mesh.data_degree)

    def place_parameters(self) -> None:
        """Compares what a run begins with, as far as its place is known without other ranks.

        Rank 0 empties the folder.
        """
        if self.comparison is not None and self.active:
            self._entries = self.comparison.settle(self._entries, self.step)
        if self.world_size > 1 and self.active:
            self._prepare_folder()  # this rank may never make a step, and others wait for it

    # -- files -------------------------------------------------------------------------------

    def end_step(self) -> None:
        """Writes the files of the current step; what follows belongs to the next one."""
        if not self.active:
            return
        self.end_update()
        journal, self._journal = self._journal, None
        if self._entries:
            if self.comparison is not None:
                self._entries = self.comparison.settle(self._entries, self.step)
            self._write(journal)
            self.steps.append(self.step)
        self.step += 1
        self._entries, self._calls, self._unread, self._is_updated = [], {}, 0, False
        self._arena.clear()

    def _write(self, journal: dict[str, Any] | None = None) -> None:
        if not self.steps and self.rank > 0:
            _bundle.wait_for_folder(self.directory, self.run, _wait_seconds())
        _bundle.write_rank(
            self.directory, self.run, self.rank, self.step, self._entries, journal, self._notes()
        )

    def _notes(self) -> dict[str, Any]:
        notes: dict[str, Any] = {"unread": self._unread} if self._unread else {}
        if self.has_own_norm:
            notes["own_norm"], self.has_own_norm = True, False
        if self.scaled:
            notes["scaled"] = self.scaled
        self.scaled = {}
        if self._unfinished:
            notes["unfinished"] = self._unfinished
        if self.world_size > 1 and self.backward_passes:
            notes["backward_passes"], self.backward_passes = self.backward_passes, 0
        if self.has_no_gradients:
            notes["no_gradients"], self.has_no_gradients = True, False
        if self._passes:
            notes["passes"] = self._passes
        if self.buffers:
            notes["buffers"], self.buffers = self.buffers, {}
        if labels := self.labels.take():
            notes["labels"], notes["losses"] = labels, self.losses
        if sites := self.sites.take():
            notes["sites"] = sites
        tables = self.dtypes.tables
        return notes if tables is None else {**notes, "tables": sorted(tables.found)}

    def forget_attempt(self, passes: int) -> None:
        """Forgets these forward passes: all of the current step but for what it begins with."""
        self._unread += passes
        self.labels.forget()
        self.has_own_norm, self.scaled = False, {}
        self.sites.take()
        self._entries = [e for e in self._entries if e.record["kind"] == "param"]
        self._calls = {key: n for key, n in self._calls.items() if key[0] == "param"}
        self.journal.take()

    def forget_gradients(self) -> None:
        """Forgets the gradients of the current step, their norm, and the loss."""

        def is_kept(kind: str, name: str) -> bool:
            return kind != "grad" and (kind, name) not in _OF_GRADIENTS

        self._entries = [e for e in self._entries if is_kept(e.record["kind"], e.record["name"])]
        self._calls = {key: n for key, n in self._calls.items() if is_kept(*key)}

    def complete_clipped(self) -> None:
        """Adds the gradients that an optimizer has read unclipped before others were clipped.

        A step has records of all of its gradients as the optimizers read them, or of none.
        """
        gradients = {e.record["name"]: e for e in self._entries if e.record["kind"] == "grad"}
        if not any(name.endswith(_bundle.CLIPPED) for name in gradients):
            return
        for name, entry in gradients.items():
            whole = name.removesuffix(_bundle.CLIPPED) + _bundle.CLIPPED
            if whole not in gradients:
                self._entries.append(replace(entry, record={**entry.record, "name": whole}))

    def forget_micro_batches(self, numbers: Collection[int]) -> None:
        """Forgets what these micro-batches of the current step have recorded."""
        self._unread += len(numbers)
        self._entries = [e for e in self._entries if e.micro not in numbers]

    def end_update(self) -> None:
        """The current step has been made; only parameters may be recorded later.

        Ranks: collective where there is a comparison. All ranks make their steps together, while
        what follows may be done by some of them alone. Rank 0 empties the folder, for which all
        others wait before they write.
        """
        if self._is_updated:
            return
        self._is_updated = True
        if self.world_size > 1:
            self._journal = self.journal.take()
        self._passes = passes_of(self._entries)
        self._entries = merged(self._entries)
        if self.comparison is not None:
            self._entries = self.comparison.settle(self._entries, self.step, together=True)
        if self._entries:
            if not self.steps:
                self.filter.check({**self.judging, **self.options.judging})
            self._prepare_folder()

    def _prepare_folder(self) -> None:
        if not self._is_prepared and self.rank == 0:
            _bundle.prepare_folder(self.directory, self.run)
        self._is_prepared = True

    def leave_unfinished(self, passes: int) -> None:
        """Writes a step that the script has not made after so many backward passes.

        The rank's parameters are all that is kept of it, as it found them and as it left them.
        Other ranks may have made the step (_rank_counts).
        """
        self._entries = [e for e in self._entries if e.record["kind"] == "param"]
        if self._entries:
            self._unfinished = passes
            self._prepare_folder()
            self._write()

    @property
    def is_unfinished(self) -> bool:
        """Whether the script has begun a step that it has not made."""
        return self._unfinished > 0

    def finish(self) -> None:
        """Ends the recording: rank 0 seals the bundle when all ranks have written theirs."""
        if not self.active:
            return
        if self._entries and self.steps and self.step == 0:
            self.end_step()
        self.active = False
        self._arena = Arena()
        self.journal.stop()
        if self.comparison is not None:
            self.comparison.close()
        unfinished = [self.step] if self._unfinished else []
        if not self.steps and not unfinished:
            raise _no_step(self.rank)
        if self.world_size > 1:
            own = _bundle.End(self.steps, unfinished)
            _bundle.leave_end(self.directory, self.run, self.rank, own)
        _bundle.wait_for_ranks(
            self.directory,
            self.run,
            [*self.steps, *unfinished],
            self.world_size,
            _wait_seconds(),
        )
        if self.rank > 0:
            limit = _wait_seconds()
            self._wait_for_manifest(limit if self.steps else min(_IDLE_SECONDS, limit))
            if not self.steps and not (self.directory / _bundle.MANIFEST).exists():
                raise _no_step(self.rank)  # others may wait for this rank
            return
        if self.world_size > 1:
            self.steps = self._steps_of_all(self.steps)
        if not self.steps:
            _bundle.remove_bundle(self.directory)
            raise _no_step(self.rank)
        _bundle.seal(self.directory, self.manifest())

    def _steps_of_all(self, own: list[int]) -> list[int]:
        """The steps that some rank has made, and that all have files of; removes all others."""
        limit = _wait_seconds() if self._unfinished else min(_GRACE_SECONDS, _wait_seconds())
        ends = _bundle.wait_for_ends(self.directory, self.run, self.world_size, limit)
        if len(ends) < self.world_size:
            return own  # one has written what this rank has, and was ended before it came here
        made = {step for end in ends for step in end.steps}
        of_all = set.intersection(*({*end.steps, *end.unfinished} for end in ends))
        _bundle.remove_steps(self.directory, made.union(*(end.unfinished for end in ends)) - of_all)
        _bundle.remove_steps(self.directory, of_all - made)
        return sorted(made & of_all)

    def _wait_for_manifest(self, limit: float) -> None:
        end = time.monotonic() + limit
        while not (self.directory / _bundle.MANIFEST).exists() and time.monotonic() < end:
            if not self.directory.exists():
                return  # no rank has made a step
            time.sleep(0.01)

    def manifest(self) -> dict[str, Any]:
        """manifest.json without the hashes."""
        training = {**self.training, **self.options.training}
        judging = {**self.dtypes.judging(), **self.judging, **self.options.judging}
        content: dict[str, Any] = {
            "schema": _bundle.SCHEMA,
            "run": self.run,
            "producer": {"name": "isoshard-python", "version": _settings.package_version()},
            "versions": _settings.versions(),
            "subject": self.subject,
            "case": self.case,
            "mesh": self.mesh.to_json(),
            "steps": self.steps,
            "settings": {"training": training, "judging": judging},
        }
        if self.comparison is not None:
            content["compared_with"] = self.comparison.compared_with
        filtered = self.filter.to_json()
        if filtered is not None:
            content["filtered"] = filtered
        if self.not_recorded:
            content["not_recorded"] = [
                {"pattern": pattern, "why": why} for pattern, why in self.not_recorded.items()
            ]
        return content

    def _agree_on_run(self) -> str:
        given = os.environ.get("ISOSHARD_RUN_ID")
        if given:
            return given
        run: list[Any] = [uuid.uuid4().hex[:16]]
        if self.world_size > 1:
            if not dist.is_initialized():
                raise RecordError(
                    "Ranks must be able to agree on a name for their run: call "
                    "torch.distributed.init_process_group before recording, or set "
                    "ISOSHARD_RUN_ID to the same new text on all ranks."
                )
            dist.broadcast_object_list(run, src=0)
        return str(run[0])


def _no_step(rank: int) -> RecordError:
    return RecordError(
        f"A recording must see at least one optimizer step, got none on rank {rank}. Let the "
        "script train for a step, give isoshard.record the optimizer that the script steps, and "
        "let the recorded part contain its step()."
    )


def sum_of_losses(losses: list[torch.Tensor]) -> torch.Tensor:
    """The sum of the losses that a step differentiated, in fp64."""
    return torch.stack([loss.double().reshape(()).cpu() for loss in losses]).sum()
