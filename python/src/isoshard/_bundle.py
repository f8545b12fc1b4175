# SPDX-License-Identifier: Apache-2.0
"""Writes, seals and reads bundles on disk (docs/reference/bundle.md, schema 2)."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ._safetensors import DTYPES, OF_HEADER, read_header, read_safetensors, write_safetensors
from .errors import BundleError, IsoshardError, RecordError

SCHEMA = 2
MANIFEST = "manifest.json"
RESPONSES = "responses.json"
#: How the name of a gradient ends that is recorded as the optimizer reads it.
CLIPPED = ".clipped"
#: Names of files that say which run is being written.
_CLAIM = ".writing-"

#: What write_rank writes itself; all else of a rank's JSON file are its notes.
OF_WRITE_RANK = ("schema", "run", "rank", "step", "records", "journal")
#: step, kind, name, call
Key = tuple[int, str, str, int]


@dataclass
class Entry:
    """One record and what is stored of its tensor; `micro` is its micro-batch, if it has one."""

    record: dict[str, Any]
    tensor: torch.Tensor
    micro: int | None = None
    #: "whole"; "sample": elements that stand for a tensor that was compared; "none": not even those
    form: str = "whole"
    is_settled: bool = False  # whether the rank has compared it, or will not

    @property
    def tensor_name(self) -> str:
        """Its name in the safetensors file."""
        name = f"{self.record['kind']}/{self.record['name']}/{self.record['call']}"
        return f"sample/{name}" if self.form == "sample" else name


def step_folder(directory: Path, step: int) -> Path:
    """Where the files of a step are."""
    return directory / f"step{step:04d}"


def rank_stem(rank: int) -> str:
    """How the files of a rank begin."""
    return f"rank{rank:05d}"


def remove_bundle(directory: Path) -> None:
    """Removes an older bundle, and nothing else: a folder that holds more is an error."""
    if not directory.exists():
        return
    paths = list(directory.iterdir()) if directory.is_dir() else []
    foreign = [p.name for p in paths if not _is_of_a_bundle(p)]
    if foreign or not directory.is_dir() or directory.is_symlink():
        raise RecordError(
            f"The folder of a bundle must be empty or an older bundle, got {directory} "
            f"({f'it contains {foreign[0]}' if foreign else 'it is not a plain folder'}). "
            "Choose another folder."
        )
    (directory / MANIFEST).unlink(missing_ok=True)
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    directory.rmdir()


def _is_of_a_bundle(path: Path) -> bool:
    if path.is_symlink():
        return False
    if path.is_dir():
        return re.fullmatch(r"step\d{4,}", path.name) is not None and all(
            re.fullmatch(r"rank\d{5,}\.(safetensors|json|done)", p.name) for p in path.iterdir()
        )
    known = (MANIFEST, MANIFEST + ".tmp", RESPONSES, "redrawn.json", "scalars.jsonl")
    return path.name in known or path.name.startswith(_CLAIM)


def prepare_folder(directory: Path, run: str) -> None:
    """Makes an empty folder for a bundle in place of an older one, for one writer of a run."""
    claim = directory / (_CLAIM + run)
    manifest = directory / MANIFEST
    if claim.exists() or (manifest.exists() and read_manifest(directory).get("run") == run):
        raise _second_writer(directory, 0)
    remove_bundle(directory)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        claim.touch(exist_ok=False)
    except FileExistsError:
        raise _second_writer(directory, 0) from None


def _second_writer(directory: Path, rank: int) -> RecordError:
    return RecordError(
        f"One process must write the files of rank {rank}, got a second one in {directory}. "
        "Do all processes call torch.distributed.init_process_group, and is --mesh the number "
        "of processes?"
    )


def write_rank(
    directory: Path,
    run: str,
    rank: int,
    step: int,
    entries: Sequence[Entry],
    journal: Mapping[str, Any] | None = None,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Writes the three files of a step and rank; the .done file comes last.

    `notes` is for this package, not for the judge:
    - `unread`, the number of forward passes whose gradients the step has not read, which have no
      records;
    - `passes`, micro-batch and rows of each input's forward passes (_micro_batches.passes_of);
    - `own_norm`, whether the script has computed the gradient norm itself;
    - `scaled`, the last factors of gradients that are no known limit over a norm (_settle);
    - `labels` and `losses` of the passes (_means);
    - `sites`, the lines of the script that made tensors (_call_sites);
    - `buffers`, fingerprints of those that a recording begins with (_buffers);
    - `tables`, the parameters that are frozen tables (_frozen_tables);
    - `backward_passes`, the number of all since the step before (_rank_counts);
    - `no_gradients`, true where an optimizer step found none (_rank_counts);
    - `unfinished`, the backward passes of a step that the script did not make (_rank_counts).
    """
    names = [e.tensor_name for e in entries]
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise RecordError(
            f"A record must have a kind, name and call of its own, got {twice} twice. Give other "
            "names with rename= or transform=."
        )
    folder = step_folder(directory, step)
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / rank_stem(rank)
    try:
        write_safetensors(
            stem.with_suffix(".safetensors"),
            [(e.tensor_name, e.tensor) for e in entries if e.form != "none"],
            is_new=True,
        )
    except FileExistsError:
        raise _second_writer(directory, rank) from None
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "run": run,
        "rank": rank,
        "step": step,
        "records": [e.record for e in entries],
    }
    if journal is not None:
        content["journal"] = journal
    content.update(notes or {})
    stem.with_suffix(".json").write_text(json.dumps(content))
    stem.with_suffix(".done").write_text(run + "\n")


def wait_for_folder(directory: Path, run: str, limit: float) -> None:
    """Waits until rank 0 has prepared the folder for this run."""
    end = time.monotonic() + limit
    while not (directory / (_CLAIM + run)).exists():
        if time.monotonic() > end:
            raise RecordError(
                f"Rank 0 must record the same steps, but after {limit:.0f} s it had not begun to "
                f"write {directory}. Does every rank train, and do all nodes see the folder?"
            )
        time.sleep(0.01)


def wait_for_ranks(
    directory: Path, run: str, steps: Sequence[int], world: int, limit: float
) -> None:
    """Waits until every rank has written every step, or has left its end (`leave_end`)."""
    end = time.monotonic() + limit
    missing = [
        step_folder(directory, step) / f"{rank_stem(rank)}.done"
        for step in steps
        for rank in range(world)
    ]
    while True:
        over = {rank_stem(r) for r in range(world) if _end_file(directory, run, r).exists()}
        missing = [
            p
            for p in missing
            if p.stem not in over and (not p.exists() or p.read_text().strip() != run)
        ]
        if not missing or (directory / MANIFEST).exists():  # rank 0 has seen all of it
            return
        if time.monotonic() > end:
            raise RecordError(
                f"Every rank must record every step, but after {limit:.0f} s "
                f"{missing[0].relative_to(directory)} was not there ({len(missing)} files "
                "are missing). Does every rank train, and do all nodes see the folder?"
            )
        time.sleep(0.01)


@dataclass(frozen=True)
class End:
    """What a rank has written when its recording ends."""

    steps: list[int]
    unfinished: list[int]  # steps that it began, and did not make


def _end_file(directory: Path, run: str, rank: int) -> Path:
    return directory / f"{_CLAIM}{run}.{rank_stem(rank)}"


def leave_end(directory: Path, run: str, rank: int, end: End) -> None:
    """Tells rank 0 that nothing more comes of a rank."""
    file = _end_file(directory, run, rank)
    temporary = file.with_name(file.name + ".tmp")
    try:
        temporary.write_text(json.dumps(asdict(end)))
        temporary.replace(file)
    except FileNotFoundError:
        return  # rank 0 had all files, and has sealed the bundle or given up


def wait_for_ends(directory: Path, run: str, world: int, limit: float) -> list[End]:
    """The ends of all ranks, or of those that have left one within the limit."""
    until = time.monotonic() + limit
    files = [_end_file(directory, run, rank) for rank in range(world)]
    while not all(file.exists() for file in files) and time.monotonic() < until:
        time.sleep(0.01)
    return [End(**json.loads(file.read_text())) for file in files if file.exists()]


def remove_steps(directory: Path, steps: Iterable[int]) -> None:
    """Removes the files of steps that are not judged."""
    for step in steps:
        shutil.rmtree(step_folder(directory, step), ignore_errors=True)


def seal(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Writes manifest.json with the hashes of all other files."""
    for claim in directory.glob(_CLAIM + "*"):
        claim.unlink()
    files = {
        path.relative_to(directory).as_posix(): _sha256(path)
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.relative_to(directory).as_posix() != MANIFEST
    }
    whole = {**manifest, "files": files}
    temporary = directory / (MANIFEST + ".tmp")
    temporary.write_text(json.dumps(whole, indent=1))
    os.replace(temporary, directory / MANIFEST)


def reseal_is_safe(directory: Path) -> bool:
    """Whether the files are those that the manifest lists, so that new hashes hide nothing."""
    manifest = read_manifest(directory)
    files = files_of(manifest, directory)
    there = {p.relative_to(directory).as_posix() for p in directory.rglob("*") if not _is_folder(p)}
    return (
        manifest.get("schema") == SCHEMA
        and there == {*files, MANIFEST}
        and all(
            (directory / name).is_file()
            and not (directory / name).is_symlink()
            and _sha256(directory / name) == digest
            for name, digest in files.items()
        )
    )


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def files_of(manifest: Mapping[str, Any], directory: Path) -> dict[str, str]:
    """The files that a manifest lists, all of them below its folder."""
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise BundleError(
            f"files of {directory / MANIFEST} must be an object of paths and hashes, got "
            f"{type(files).__name__}. Seal the bundle anew."
        )
    for name in files:
        parts = name.split("/")
        if "\\" in name or any(part in ("", ".", "..") for part in parts):
            raise BundleError(
                f"A file of {directory / MANIFEST} must be a path below the folder, got {name!r}. "
                "Record the bundle anew."
            )
    return dict(files)


def write_part(
    directory: Path,
    target: Path,
    keeps: Callable[[int, dict[str, Any]], bool],
    keeps_journal: Callable[[int], bool] = lambda step: True,
) -> None:
    """A copy of a bundle with the records of which `keeps` is true, by their step.

    Steps of which nothing is left are not in it.
    """
    remove_bundle(target)
    manifest = read_manifest(directory)
    steps = []
    for step in manifest["steps"]:
        contents = {
            rank: read_records(directory, step, rank) for rank in ranks_of_step(directory, step)
        }
        if not any(keeps(step, r) for content in contents.values() for r in content["records"]):
            continue
        steps.append(step)
        for rank, content in contents.items():
            tensors = read_tensors(directory, step, rank)
            kept = [r for r in content["records"] if keeps(step, r)]
            entries = [Entry(r, tensors[f"{r['kind']}/{r['name']}/{r['call']}"]) for r in kept]
            notes = {k: v for k, v in content.items() if k not in OF_WRITE_RANK}
            journal = content.get("journal") if keeps_journal(step) else None
            write_rank(target, manifest["run"], rank, step, entries, journal, notes)
    if (directory / RESPONSES).exists():
        content = _read_json(directory / RESPONSES)
        of_steps = [r for r in content["responses"] if r["step"] in steps and keeps(r["step"], r)]
        (target / RESPONSES).write_text(json.dumps({**content, "responses": of_steps}))
    others = {key: value for key, value in manifest.items() if key != "files"}
    seal(target, {**others, "steps": steps})


def with_inputs_alone(directory: Path, target: Path) -> Path:
    """A copy of a bundle that has nothing but its inputs, each as its rank has it."""
    manifest = read_manifest(directory)
    for step in manifest["steps"]:
        for rank in ranks_of_step(directory, step):
            fields = ("kind", "name", "call", "dtype", "local_shape")
            records = [
                {**{field: r[field] for field in fields}, "global_shape": r["local_shape"]}
                for r in read_records(directory, step, rank)["records"]
                if r["kind"] == "data_id"
            ]
            tensors = read_some_tensors(directory, step, rank, "data_id/")
            entries = [Entry(r, tensors[f"data_id/{r['name']}/{r['call']}"]) for r in records]
            write_rank(target, manifest["run"], rank, step, entries)
    others = ("files", "compared_with")
    seal(target, {key: value for key, value in manifest.items() if key not in others})
    return target


def reseal(directory: Path) -> None:
    """Writes the hashes anew after a file was added or changed."""
    seal(directory, read_manifest(directory))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if _HAS_DIGEST else _slow(file)


_HAS_DIGEST = hasattr(hashlib, "file_digest")


def _slow(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def read_manifest(directory: Path) -> dict[str, Any]:
    """What manifest.json says."""
    path = directory / MANIFEST
    if not path.exists():
        raise RecordError(f"A bundle must have a {MANIFEST}, got {directory} without one.")
    return _read_json(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} must be JSON, got {error}. Record the bundle anew.") from None
    if not isinstance(content, dict):
        raise BundleError(
            f"{path} must hold a JSON object, got {type(content).__name__}. Record the bundle anew."
        )
    return content


@contextmanager
def checked(directory: Path) -> Iterator[None]:
    """Says of what goes wrong in reading a bundle that its files are malformed."""
    try:
        yield
    except BundleError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        IsoshardError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise BundleError(
            "The files of a bundle must be as docs/reference/bundle.md says, "
            f"got {type(error).__name__}: {error} in reading {directory}. "
            "Ask isoshard bundle check about it."
        ) from error


def ranks_of_step(directory: Path, step: int) -> list[int]:
    """The ranks that have files of a step, in order."""
    paths = step_folder(directory, step).glob("*.json")
    return sorted(int(path.stem.removeprefix("rank")) for path in paths)


def grad_scale_of(record: dict[str, Any]) -> float:
    """The number by which a recorded gradient must be divided, which may be a hexadecimal text."""
    value = record.get("grad_scale", 1)
    return float.fromhex(value) if isinstance(value, str) else float(value)


def read_records(directory: Path, step: int, rank: int) -> dict[str, Any]:
    """The JSON file of a step and rank; what records may leave out is filled in."""
    stem = step_folder(directory, step) / rank_stem(rank)
    content = _read_json(stem.with_suffix(".json"))
    header: dict[str, Any] | None = None
    for record in content["records"]:
        record.setdefault("call", 0)
        if "local_shape" not in record or "dtype" not in record:
            if header is None:
                header = read_header(stem.with_suffix(".safetensors"))[0]
            entry = header[f"{record['kind']}/{record['name']}/{record['call']}"]
            record.setdefault("local_shape", entry["shape"])
            record.setdefault("dtype", DTYPES[OF_HEADER[entry["dtype"]]][0])
    return content


def tables(directory: Path) -> list[str]:
    """Parameters of which no step of a reference has done more than copy rows (_frozen_tables)."""
    with checked(directory):
        manifest = read_manifest(directory)
        found: list[str] = []
        for step in manifest["steps"]:
            file = step_folder(directory, step) / f"{rank_stem(0)}.json"
            found = _read_json(file).get("tables", []) if file.exists() else []
        return found


def write_records(directory: Path, step: int, rank: int, content: Mapping[str, Any]) -> None:
    """Writes the JSON file of a step and rank anew; the bundle has to be resealed."""
    path = step_folder(directory, step) / f"{rank_stem(rank)}.json"
    path.write_text(json.dumps(content))


def read_tensors(directory: Path, step: int, rank: int) -> dict[str, torch.Tensor]:
    """The tensors of a step and rank, as KIND/NAME/CALL."""
    return read_safetensors(step_folder(directory, step) / f"{rank_stem(rank)}.safetensors")


def read_some_tensors(
    directory: Path, step: int, rank: int, prefix: str
) -> dict[str, torch.Tensor]:
    """Those whose name has this prefix, without reading the others."""
    path = step_folder(directory, step) / f"{rank_stem(rank)}.safetensors"
    return read_safetensors(path, prefix)
