# SPDX-License-Identifier: Apache-2.0
"""`isoshard repro`: a stand-alone script that shows the first wrong tensor of a judged run."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from . import _bundle, _command, _environment, _launch
from ._command import Command
from ._mesh import Mesh
from ._processes import end_processes
from ._repro_places import Unplaced, places_of
from ._repro_script import MARK, MOST_LINES, NotShown, Start, Wrong, plain, write
from .errors import BundleError, UsageError

DEFAULT_NAME = "repro.py"
_SHOWN, _NOT_SHOWN = 0, 1
_BUG_IS_THERE = 1  # the exit code of a written script
#: How far the numbers that a script prints may be from those of the judged run.
_NEAR = 1e-2
#: Elements that the judge leaves out may move as far as this many times the perturbed runs' do.
_TIMES_PERTURBED = 8
_EXACT = ("data_id", "mask")
_PRINTED = r"norm (\S+), right is (\S+); factor (\S+); "


@dataclass(frozen=True)
class ReproOptions:
    """The command line of `isoshard repro`."""

    folder: Path
    output: Path | None = None
    timeout: float = 300.0


@dataclass(frozen=True)
class _Numbers:
    """What a script should print of one copy."""

    norm: float
    right: float
    factor: float

    def agree(self, other: _Numbers) -> bool:
        """Whether two runs show the same error."""
        return all(
            math.isclose(a, b, rel_tol=_NEAR, abs_tol=1e-12) or (math.isnan(a) and math.isnan(b))
            for a, b in (
                (self.norm, other.norm),
                (self.right, other.right),
                (self.factor, other.factor),
            )
        )


@dataclass(frozen=True)
class _Case:
    """The first wrong tensor of one precision, and what the judged run had of it."""

    wrong: Wrong
    expected: list[_Numbers]
    mesh: Mesh
    is_float64: bool


def repro(options: ReproOptions) -> int:
    """Writes the script and returns the exit code of the command."""
    folder = options.folder
    if not folder.is_dir():
        raise BundleError(f"DIR must be the --output-dir of isoshard judge, got {folder}.")
    output = options.output or folder / DEFAULT_NAME
    _require_output(output)
    try:
        case, command = _case_of(folder), _command.read(folder)
        fewer = _on_two_ranks(case, command, options)
        written = _first_that_shows(fewer or case, command, output.resolve(), options)
        if fewer is not None:
            written += [f"It starts 2 ranks, not {case.mesh.size}: the same tensor is wrong there."]
    except (NotShown, Unplaced) as error:
        print(f"isoshard: no script was written: {error}.", file=sys.stderr)
        return _NOT_SHOWN
    print(f"{output} shows {case.wrong.title} and exits with 1.")
    for line in written:
        print(f"  {line}")
    return _SHOWN


def _require_output(output: Path) -> None:
    if output.suffix != ".py" or not output.parent.is_dir():
        raise UsageError(f"--output must be a file FILE.py in a folder that exists, got {output}.")
    if output.exists() and MARK not in output.read_text(errors="replace"):
        raise UsageError(
            f"--output must not replace a file of yours, got {output}, which isoshard repro has "
            "not written. Name another file."
        )


# -- what was judged -----------------------------------------------------------------------------


def _case_of(folder: Path) -> _Case:
    """The first wrong tensor: of the native run, or else of the one in float64."""
    verdicts = []
    for precision in (folder, folder / "float64"):
        file = precision / "report" / "report.json"
        if not file.is_file():
            continue
        verdict = _verdict_of(file)
        verdicts.append(str(verdict["status"]))
        if verdict["status"] == "diverges":
            return _wrong_of(precision, verdict, is_float64=precision is not folder)
    if not verdicts:
        raise BundleError(
            f"DIR must be the --output-dir of isoshard judge with a verdict in it, got {folder} "
            "without report/report.json."
        )
    raise UsageError(
        f"DIR must be of a run that diverges, got {folder}, whose verdict is "
        f"{' and '.join(verdicts)}. There is nothing to reproduce."
    )


def _verdict_of(file: Path) -> dict[str, Any]:
    try:
        (case,) = json.loads(file.read_text())["cases"]
        return {**case, "status": case["status"], "findings": case.get("findings", [])}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"{file} must be the report of one verdict, got {error!r}.") from None


def _wrong_of(folder: Path, verdict: Mapping[str, Any], *, is_float64: bool) -> _Case:
    findings = verdict["findings"]
    if not findings:
        raise NotShown(f"the verdict names no wrong tensor ({verdict['reason']})")
    first = findings[0]
    title, _, _ = str(first["what"]).partition(": ")
    key = (first["step"], first["kind"], first["name"], first["call"])
    compared = [t for t in verdict["tensors"] if tuple(t[k] for k in _KEY) == key]
    if not compared or compared[0]["within"]:
        raise NotShown(f"what is wrong is no tensor that was compared ({first['what']})")
    run, reference = folder / "run", folder / "reference"
    with _bundle.checked(run):
        manifest = _bundle.read_manifest(run)
        mesh = Mesh.from_json(manifest["mesh"])
        records = _records(run, key, mesh.size)
        right = _tensor(reference, key, 0)
        if not records or right is None:
            raise NotShown(f"the folder has no values of the {title}")
        places = places_of(records, mesh)
        held = {rank: _tensor(run, key, rank) for rank in records}
    if any(held[rank] is None for copy in places.copies for rank in copy):
        raise NotShown(f"the folder has no values of the {title}")
    record = records[min(records)]
    factor = 1.0 / _bundle.grad_scale_of(record)
    parts = {rank: tensor * factor for rank, tensor in held.items() if tensor is not None}
    right = right.double().reshape(places.shape)
    bound, bound_is, bound_from = _bound(folder, key, compared[0], right)
    wrong = Wrong(
        step=key[0],
        kind=key[1],
        name=key[2],
        call=key[3],
        title=title,
        cause=str(first.get("diagnosis") or ""),
        places=places,
        factor=factor,
        bound=bound,
        bound_is=bound_is,
        bound_from=bound_from,
        parameter=_parameter(run, key),
        calls=len(_calls_of(run, key)),
        is_clipped="max_grad_norm" in manifest["settings"].get("training", {}),
    )
    expected = [_numbers(places.assemble(parts, copy), right) for copy in places.copies]
    return _Case(wrong, expected, mesh, is_float64)


_KEY = ("step", "kind", "name", "call")


def _records(bundle: Path, key: _bundle.Key, ranks: int) -> dict[int, dict[str, Any]]:
    found = {}
    for rank in range(ranks):
        for record in _bundle.read_records(bundle, key[0], rank)["records"]:
            if (record["kind"], record["name"], record["call"]) == key[1:]:
                found[rank] = record
    return found


def _calls_of(bundle: Path, key: _bundle.Key) -> list[int]:
    records = _bundle.read_records(bundle, key[0], 0)["records"]
    return [r["call"] for r in records if (r["kind"], r["name"]) == key[1:3]] or [0]


def _tensor(bundle: Path, key: _bundle.Key, rank: int) -> torch.Tensor | None:
    name = "/".join(map(str, key[1:]))
    return _bundle.read_some_tensors(bundle, key[0], rank, name).get(name)


def _parameter(run: Path, key: _bundle.Key) -> str:
    """The parameter that the tensor is about, or else the first one that has a gradient."""
    if key[1] in ("param", "grad"):
        return plain(key[2])
    if key[1] == "optimizer" and not key[2].endswith(".buffer"):
        return plain(key[2].rpartition(".")[0])
    records = _bundle.read_records(run, 0 if key[0] == 0 else key[0], 0)["records"]
    names = [r["name"] for r in records if r["kind"] in ("grad", "param")]
    if not names:
        raise NotShown("the run has no parameter by which a script could find the model")
    return plain(names[0])


def _bound(
    folder: Path, key: _bundle.Key, compared: Mapping[str, Any], right: torch.Tensor
) -> tuple[float, str, str]:
    """What is allowed, in which sense, and where it is from."""
    allowed, error = compared["allowed_relative_error"], _number(compared["relative_error"])
    source = "of this tensor in report.json of isoshard judge"
    if key[1] in _EXACT or allowed is None:
        return 0.0, "absolute", "isoshard judge compares this bit by bit"
    if compared["insensitive"]:
        return _number(compared["allowed_absolute"]), "absolute", f"allowed_absolute {source}"
    if error <= _number(allowed):
        name = "allowed_scale_error"
        return _number(compared[name]), "scale", f"{name} {source}"
    if compared["unmasked_share"] < 1:
        moved = max((_moved(path, key, right) for path in folder.glob("perturbed?")), default=0.0)
        if moved > _number(allowed):
            share = f"{_TIMES_PERTURBED} times what weights moved by one ulp change here"
            return _TIMES_PERTURBED * moved, "relative", share
    return _number(allowed), "relative", f"allowed_relative_error {source}"


def _moved(perturbed: Path, key: _bundle.Key, right: torch.Tensor) -> float:
    value = _tensor(perturbed, key, 0)
    if value is None:
        return 0.0
    return float((value.double().reshape(right.shape) - right).norm() / right.norm())


def _number(value: Any) -> float:
    """Numbers are texts where JSON has none for them."""
    return float.fromhex(value) if isinstance(value, str) and "x" in value else float(value)


def _numbers(actual: torch.Tensor, right: torch.Tensor) -> _Numbers:
    factor = (actual * right).sum() / right.square().sum()
    return _Numbers(float(actual.norm()), float(right.norm()), float(factor))


# -- fewer ranks ---------------------------------------------------------------------------------


def _on_two_ranks(case: _Case, command: Command, options: ReproOptions) -> _Case | None:
    """The same wrong tensor of a run on two ranks, if two have it; the run is judged anew."""
    axes = [axis for axis, degree in case.mesh.axes.items() if degree > 1]
    words = _with_world_size(list(command.words), case.mesh.size, 2)
    if case.mesh.size == 2 or len(axes) != 1 or words is None or command.reference is not None:
        return None
    judge = [sys.executable, "-m", "isoshard", "judge", "--quiet", "--mesh", f"{axes[0]}=2"]
    judge += ["--steps", str(case.wrong.step + 1), "--timeout", f"{options.timeout:g}"]
    judge += [] if case.is_float64 else ["--precision", "native"]
    for flag, value in (
        ("--no-dropout", command.no_dropout),
        ("--reference-command", command.reference_command),
        ("--loss", command.loss_reduction),
        ("--options", command.options_file),
    ):
        judge += ([flag] if value is True else [flag, str(value)]) if value else []
    with tempfile.TemporaryDirectory(prefix="isoshard-") as folder:
        judge += ["--output-dir", folder, "--", *words]
        environment = _environment.without_options()
        subprocess.run(judge, cwd=command.folder, env=environment, capture_output=True, check=False)
        try:
            fewer = _case_of(Path(folder))
        except (NotShown, Unplaced, BundleError, UsageError):
            return None
    is_same = all(getattr(fewer.wrong, k) == getattr(case.wrong, k) for k in _KEY)
    return fewer if is_same and fewer.is_float64 == case.is_float64 else None


def _with_world_size(words: list[str], old: int, new: int) -> list[str] | None:
    """A launcher's command with another number of processes; None if that is not to be found."""
    for i, word in enumerate(words):
        option, equals, number = word.rpartition("=")
        if number == str(old):
            changed = [*words[:i], f"{option}{equals}{new}", *words[i + 1 :]]
            launch = _launch.parse(changed)
            if launch is not None and launch.world_size == new:
                return changed
    return None


# -- what is written -----------------------------------------------------------------------------


def _first_that_shows(
    case: _Case, command: Command, output: Path, options: ReproOptions
) -> list[str]:
    """Stores the most reduced script that shows the tensor; what the user should know of it.

    A script that does not show it is not stored.
    """
    why = ""
    for start, said in _starts(case, command, output):
        text = write(case.wrong, start, output.name)
        if text.count("\n") > MOST_LINES:
            text = write(case.wrong, replace(start, is_brief=True), output.name)
        if text.count("\n") > MOST_LINES:
            lines = text.count("\n")
            why = why or f"a script would have {lines} lines, and {MOST_LINES} are the most"
            continue
        failed = _why_not_shown(text, case, output, options)
        if not failed:
            output.write_text(text)
            return said
        why = why or f"the script did not show it: {failed}"
    hints = "".join(f". {text}" for text in _hints(command, case))
    raise NotShown(f"{case.wrong.title}: {why}{hints}")


def _starts(case: _Case, command: Command, output: Path) -> Iterator[tuple[Start, list[str]]]:
    """Ways to start the training script, the most reduced one first."""
    words = list(command.words)
    script, arguments = _launch.script_of(words)
    if not script:
        raise NotShown("the command names no script (a word that ends in .py, or -m MODULE)")
    is_module = script[0] == "-m"
    launch = _launch.parse(words)
    start = Start(
        script=script[-1],
        arguments=arguments,
        world_size=case.mesh.size,
        mesh=str(case.mesh),
        folder=os.path.relpath(command.folder, output.parent),
        is_module=is_module,
        single=_single(command, script, arguments),
        environment=launch.environment if launch is not None else {},
        adds_local_rank=launch is not None and launch.adds_local_rank,
        no_dropout=command.no_dropout,
        is_float64=case.is_float64,
    )
    said = [f"It runs {start.script}, which it needs, in {command.folder}."]
    if case.is_float64:
        said += ["Only float64 shows it: the script sets torch's default dtype to float64."]
    forms = (start, replace(start, is_careful=True))
    for form in (*forms, *(replace(form, shrinks_meshes=True) for form in forms)):
        yield form, said


def _single(command: Command, script: list[str], arguments: list[str]) -> list[str] | None:
    if command.reference_command is None:
        return None
    own, words = _launch.script_of(shlex.split(command.reference_command))
    if own[:1] == ["-m"] or script[:1] == ["-m"]:
        raise NotShown("the reference has a command of its own, and one of both is a module")
    return None if [*own, *words] == [*script, *arguments] else [*own, *words]


def _why_not_shown(text: str, case: _Case, output: Path, options: ReproOptions) -> str:
    """Runs a script in its place, without this package; empty if it shows the tensor."""
    file = output.with_name(f".{output.stem}.trying.py")
    file.write_text(text)
    try:
        code, out, errors = _run(file, options.timeout)
    finally:
        file.unlink()
    if code is None:
        return f"it took more than {options.timeout:g} s (--timeout)"
    if code == 0:
        return "in the script's runs nothing is wrong"
    found = [_Numbers(float(m[1]), float(m[2]), float(m[3])) for m in re.finditer(_PRINTED, out)]
    if not found or code != _BUG_IS_THERE:
        lines = [line for line in errors.splitlines() if line.strip()]
        return f"it failed ({lines[-1].strip() if lines else f'exit code {code}'})"
    if len(found) != len(case.expected) or not all(
        mine.agree(theirs) for mine, theirs in zip(found, case.expected, strict=True)
    ):
        return (
            f"its numbers are not those of the judged run (norm {found[0].norm:.4g}, right is "
            f"{found[0].right:.4g}, factor {found[0].factor:.4g}; judged: "
            f"{case.expected[0].norm:.4g}, {case.expected[0].right:.4g}, "
            f"{case.expected[0].factor:.4g})"
        )
    return ""


def _run(file: Path, limit: float) -> tuple[int | None, str, str]:
    """Exit code (None after the limit), output and errors."""
    process = subprocess.Popen(
        [sys.executable, str(file)],
        cwd=file.parent,
        env=environment_without_this(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return None, "", ""
    finally:
        if process.poll() is None:
            end_processes([process.pid])
            process.communicate()
    return process.returncode, out, errors


def environment_without_this() -> dict[str, str]:
    """The environment without this package: its variables and its folder on PYTHONPATH."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ISOSHARD_")}
    paths = kept.pop("PYTHONPATH", "").split(os.pathsep)
    mine = Path(__file__).parent.name
    paths = [path for path in paths if path and not Path(path, mine, "__init__.py").is_file()]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)} if paths else kept


def _hints(command: Command, case: _Case) -> list[str]:
    """Options of the judged run that a script cannot repeat."""
    hints = []
    if command.generic_weights:
        hints.append("--generic-weights moved the weights, and the script cannot")
    if command.replay:
        hints.append("--replay gave one process the ranks' samples, and the script does not")
    if command.options_file is not None:
        hints.append("--options may have renamed or changed tensors, and the script does not")
    if command.reference is not None:
        hints.append("The reference was a bundle, and the script runs one process in its place")
    if case.is_float64:
        hints.append("Only float64 shows it, and the script only sets torch's default dtype")
    return hints
