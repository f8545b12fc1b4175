# SPDX-License-Identifier: Apache-2.0
"""Pairs of a reference and a judged run that are stored, and the verdicts on them.

fixtures/corpus/pairs.json lists packs. A pack is a .tar.xz file of bundles that share a reference:
most of a wrong run is a copy of the right one, so runs beside each other cost little. The bundles
below fixtures/frameworks are judged where they are.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import pathlib
import shutil
import tarfile

from answers import (
    Answer,
    CorpusError,
    answer_of_case,
    answer_of_refusal,
    fits,
    read_json,
    write_text,
)
from programs import NOT_RUN, Programs


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two bundles below `folder`."""

    id: str
    folder: pathlib.Path
    reference: str
    judged: str
    options: tuple[str, ...] = ()


def unpacked(pack: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """The folder of a pack's bundles, which an earlier call may have made."""
    target, stamp = folder / pack.name.split(".")[0], folder / (pack.name + ".sha256")
    try:
        digest = hashlib.sha256(pack.read_bytes()).hexdigest()
    except OSError as error:
        raise CorpusError(f"{pack}: cannot be read: {error.strerror}") from error
    if target.is_dir() and stamp.exists() and stamp.read_text() == digest:
        return target
    shutil.rmtree(target, ignore_errors=True)
    try:
        with tarfile.open(pack, "r:xz") as archive:
            for member in archive:
                path = target / member.name
                if not member.isfile() or ".." in path.parts:
                    raise CorpusError(f"{pack}: {member.name} must be a file below the pack")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.extractfile(member).read())
    except (tarfile.TarError, EOFError, OSError) as error:
        raise CorpusError(f"{pack}: must be a .tar.xz file of bundles, got: {error}") from error
    write_text(stamp, digest)
    return target


def packed_pairs(corpus: pathlib.Path, scratch: pathlib.Path, only: str) -> list[Pair]:
    """Those of pairs.json that fit, with their packs unpacked below `scratch`."""
    pairs = []
    for name, pack in read_json(corpus / "pairs.json")["packs"].items():
        runs = {run: row for run, row in pack["runs"].items() if fits(f"{name}/{run}", only)}
        if not runs:
            continue
        folder = unpacked(corpus / f"{name}.tar.xz", scratch)
        for run, row in runs.items():
            trusted = read_json(folder / "index.json").get(run, run)
            for bundle in (trusted, run):
                if not (folder / bundle).is_dir():
                    raise CorpusError(f"{corpus / name}.tar.xz: must have {bundle}, and has not")
            options = tuple(row.get("options", ()))
            pairs.append(Pair(f"{name}/{run}", folder, trusted, run, options))
    return pairs


def framework_pairs(corpus: pathlib.Path, only: str) -> list[Pair]:
    """Those that fit of the folder that pairs.json names: fixtures/frameworks/*/expected.json."""
    pairs = []
    frameworks = read_json(corpus / "pairs.json").get("frameworks")
    if frameworks is None:
        return []
    frameworks = (corpus / frameworks).resolve()
    for listing in sorted(frameworks.glob("*/expected.json")):
        expected = read_json(listing)
        options = tuple(word for pair in expected["options"].items() for word in pair)
        folder = listing.parent
        for run in expected["runs"]:
            pairs.append(Pair(f"frameworks/{folder.name}/{run}", folder, "reference", run, options))
    return [pair for pair in pairs if fits(pair.id, only)]


def judged(pair: Pair, programs: Programs, report: pathlib.Path) -> Answer:
    """The verdict on a pair.   Errors   CorpusError if the program breaks down."""
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    # Relative paths: messages are the same wherever the bundles lie.
    words = ["compare", pair.reference, pair.judged, *pair.options, "--report", str(report)]
    done = programs.run("isoshard-judge", words, pair.folder)
    if done.returncode < 0:
        raise CorpusError(f"{pair.id}: isoshard-judge died of signal {-done.returncode}", NOT_RUN)
    if done.returncode > 1:
        return answer_of_refusal(done.returncode, done.stderr)
    cases = read_json(report)["cases"]
    if len(cases) != 1:
        raise CorpusError(f"{report}: must have one case, got {len(cases)}")
    return {"exit_code": done.returncode} | answer_of_case(cases[0])


def judge_all(
    pairs: list[Pair], programs: Programs, scratch: pathlib.Path, jobs: int
) -> dict[str, Answer]:
    """The verdicts on all pairs."""
    programs.path("isoshard-judge")
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        # A folder each, as programs that write a report lock its folder.
        reports = [scratch / "reports" / pair.id / "report.json" for pair in pairs]
        answers = pool.map(lambda p, r: judged(p, programs, r), pairs, reports)
        return {pair.id: answer for pair, answer in zip(pairs, answers)}
