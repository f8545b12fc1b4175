# SPDX-License-Identifier: Apache-2.0
"""Records the bundles of fixtures/frameworks: each framework once right, and with planted bugs.

    cd python/tests && python -m record_bundles [--verdicts] [NAME ...]

Each folder gets the bundles `reference`, `right` and `faulty_...`; expected.json beside them is
written by hand and stays. The verdicts are printed, to be held against it. --verdicts judges what
is there and records nothing. Bytes are the same each time on one machine: ids of runs are names.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bundle_cases import CASES, Case
from live_runs import Runs, edited

from isoshard import _bundle, _program

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "fixtures" / "frameworks"
#: Bundles that no framework and no recorder wrote, under this name.
WRITER = ROOT / "examples" / "bundle_writer" / "write_bundles.py"
BY_HAND = WRITER.parent.name
EXPECTED = "expected.json"
#: What a framework's folder may take.
LIMIT = 1_000_000


def record(name: str, case: Case) -> None:
    """Records all runs of a case, and puts them in place of older ones."""
    with tempfile.TemporaryDirectory(prefix=f"isoshard-{name}-") as temporary:
        folder = Path(temporary)
        options = ("--steps", str(case.steps), *case.options)
        runs = Runs(folder, case.script, case.words, case.edits, *options)
        for path, edits in case.helpers.items():
            (folder / path).write_text(edited((folder / path).read_text(), edits))
        code, text = runs.right(case.mesh, case.ranks)
        if code != 0:
            raise SystemExit(f"The right run of {name} must conform, got:\n{text}")
        print(f"{name}: right: exit code {code}: {_last(text)}", flush=True)
        bundles = {"reference": runs.reference, "right": runs.reference.with_name("run")}
        for fault, planted in case.faults.items():
            kept = folder / fault
            code, text = runs.faulty(planted, case.mesh, case.ranks, kept)
            print(f"{name}: {fault}: exit code {code}: {_last(text)}", flush=True)
            bundles[f"faulty_{fault}"] = kept / "run"
        _replace(FOLDER / name, name, bundles)


def record_by_hand() -> None:
    """The bundles of examples/bundle_writer."""
    with tempfile.TemporaryDirectory(prefix="isoshard-by-hand-") as temporary:
        folder = Path(temporary)
        subprocess.run([sys.executable, str(WRITER), temporary], check=True)
        _program.respond(folder / "reference", [folder / f"perturbed{i}" for i in (1, 2, 3)])
        bundles = {name: folder / name for name in ("reference", "right", "faulty_sum")}
        _replace(FOLDER / BY_HAND, BY_HAND, bundles)


def _last(text: str) -> str:
    words = ("CONFORMS", "DIVERGES", "VACUOUS", "INCOMPLETE")
    return next((line for line in text.splitlines() if line.startswith(words)), text)


def _replace(folder: Path, name: str, bundles: Mapping[str, Path]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    for bundle, path in bundles.items():
        _copy(path, folder / bundle, f"{name} {bundle}")


def _copy(bundle: Path, into: Path, run: str) -> None:
    """A copy whose run has a name in place of a random id, and whose JSON is compact."""
    shutil.copytree(bundle, into)
    manifest = _bundle.read_manifest(into)
    for path in sorted(into.rglob("*")):
        if path.suffix == ".done":
            path.write_text(run + "\n")
        elif path.suffix == ".json" and path.name != _bundle.MANIFEST:
            path.write_text(_compact(json.loads(path.read_text()), run))
    _bundle.seal(into, {**manifest, "run": run})


def _compact(content: Any, run: str) -> str:
    """One line for each record, without what docs/reference/bundle.md lets a writer leave out."""
    if "run" in content:
        content["run"] = run
    lines = []
    for key, value in content.items():
        if key == "records":
            value = [_needed(record) for record in value]
        if isinstance(value, list):
            text = "[\n" + ",\n".join(_dense(entry) for entry in value) + "\n]"
        else:
            text = _dense(value)
        lines.append(f"{_dense(key)}:{text}")
    return "{" + ",\n".join(lines) + "}\n"


def _dense(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _needed(record: dict[str, Any]) -> dict[str, Any]:
    """Without what the safetensors file says, without defaults, and without a box of the whole."""
    zeros = [0] * len(record["global_shape"])
    whole = {"local_offset": zeros, "global_offset": zeros, "size": record["global_shape"]}
    optional = {"call": 0, **{k: record.get(k) for k in ("local_shape", "dtype")}}
    if record.get("boxes") == [whole] and not record.get("placements"):
        optional["boxes"] = [whole]
    return {k: v for k, v in record.items() if k not in optional or v != optional[k]}


def verdicts(name: str) -> Iterator[str]:
    """What the judge says of each stored run of a framework, by the options of expected.json."""
    folder = FOLDER / name
    expected = json.loads((folder / EXPECTED).read_text())
    options = [str(word) for pair in expected["options"].items() for word in pair]
    for run in expected["runs"]:
        arguments = ["compare", str(folder / "reference"), str(folder / run), *options, "--verbose"]
        code, text = _program.call(arguments, capture=True)
        yield f"{name}: {run}: exit code {code}: {_last(text)}"


def size_of(folder: Path) -> int:
    """Bytes of all files below."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main(words: list[str]) -> None:
    """Records, or judges, the named frameworks, or all of them."""
    known = [*CASES, BY_HAND]
    names = [word for word in words if word != "--verdicts"] or known
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"A name must be one of {', '.join(known)}, got {', '.join(unknown)}.")
    for name in names:
        if "--verdicts" in words:
            print(*verdicts(name), sep="\n")
            continue
        if name == BY_HAND:
            record_by_hand()
        else:
            record(name, CASES[name])
        size = size_of(FOLDER / name)
        print(f"{name}: {size} bytes")
        if size > LIMIT:
            raise SystemExit(f"A framework's bundles must take at most {LIMIT} bytes, got {size}.")


if __name__ == "__main__":
    main(sys.argv[1:])
