# SPDX-License-Identifier: Apache-2.0
"""Whole runs, in parts that are each done once: presets, faults, benign variations, the study."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import pathlib
import re
import time

from answers import (
    Answer,
    CorpusError,
    answer_of_case,
    fits,
    id_fields,
    read_json,
    write_text,
)
from programs import NOT_RUN, Programs

STUDY_COUNT = 400
PART_LIMIT_S = 3600  # of one part; the study is the longest
STUDY_COLUMNS = [
    *("fired", "visible", "exact", "within", "exact_place", "within_place"),
    *("cause_place", "cause_ranks", "grade"),
]


def faults_by_subject(programs: Programs, folder: pathlib.Path) -> dict[str, dict]:
    """Class and subjects of each fault that is built, from `isoshard list faults`."""
    listing = programs.run("isoshard", ["list", "faults"], folder)
    if listing.returncode != 0:
        raise CorpusError(f"isoshard list faults: {listing.stderr.strip()}", NOT_RUN)
    faults: dict[str, dict] = {}
    letter = ""
    for line in listing.stdout.splitlines():
        if line.startswith("benign variations"):
            break
        if head := re.match(r"([A-Z])  ", line):
            letter = head.group(1)
        elif row := re.match(r"  (\w+)  +(\w+(?: \w+)*)$", line):
            faults[row.group(1)] = {"class": letter, "subjects": row.group(2).split()}
    if not faults:
        raise CorpusError("isoshard list faults: must list faults, and lists none", NOT_RUN)
    return faults


def parts_of(programs: Programs, folder: pathlib.Path) -> dict[str, list[str]]:
    """Name of each part -> the command line that makes it."""
    parts = {f"verify/{name}": ["verify", "--preset", name] for name in ("small", "thorough")}
    listing = faults_by_subject(programs, folder)
    for letter in sorted({row["class"] for row in listing.values()}):
        parts[f"faults/{letter}"] = ["faults", "run", "--class", letter]
    parts["benign"] = ["faults", "--benign"]
    # The runs of the suites FsdpFaults and MegatronFaults, which keep no verdicts.
    for subject in ("fsdp_tp", "megatron"):
        for fault, row in listing.items():
            if subject in row["subjects"]:
                parts[f"subjects/{subject}/{fault}"] = [
                    *("verify", "--fault", fault, "--subjects", subject)
                ]
    parts["cases"] = []
    parts["study"] = [*("faults", "study", "--curve-steps", "2"), "--count", str(STUDY_COUNT)]
    return parts


def answers_of_report(part: str, report: pathlib.Path) -> dict[str, Answer]:
    """Each case of a report.json."""
    answers: dict[str, Answer] = {}
    for case in read_json(report)["cases"]:
        key = "/".join(filter(None, [part, case.get("fault"), case["case"]]))
        if key in answers:
            raise CorpusError(f"{report}: two cases are {key}")
        answers[key] = answer_of_case(case)
        if "detection" in case:
            answers[key]["as_expected"] = case["detection"]["as_expected"]
    return answers


def answers_of_study(part: str, table: pathlib.Path) -> dict[str, Answer]:
    """Each row of a study.csv: which alarms, whether in the right place, which cause."""
    answers = {}
    with table.open(encoding="utf-8", newline="") as stream:
        next(stream)  # seed and number of steps
        for row in csv.DictReader(stream):
            answer: Answer = {name: row[name] for name in STUDY_COLUMNS}
            if row["cause"]:
                numbers = json.loads(row["cause_values"])
                answer |= id_fields("cause", {"id": row["cause"], "numbers": numbers})
            answers[f"{part}/{row['index']}.{row['case']}"] = answer
    return answers


def answers_of_tests(part: str, results: pathlib.Path) -> dict[str, Answer]:
    """Which cases of a GoogleTest program pass."""
    answers = {}
    for suite in read_json(results)["testsuites"]:
        for case in suite["testsuite"]:
            passed = case["result"] == "COMPLETED" and not case.get("failures")
            answers[f"{part}/{suite['name']}.{case['name']}"] = {"passed": passed}
    return answers


def run_part(part: str, words: list[str], programs: Programs, folder: pathlib.Path) -> None:
    """Runs one part and writes its answers to `folder`/answers.json."""
    programs = dataclasses.replace(programs, timeout_s=PART_LIMIT_S)
    if part == "cases":
        results = folder / "tests.json"
        tests = dataclasses.replace(programs, folder=programs.folder.parent / "tests")
        done = tests.run("other_cases_test", [f"--gtest_output=json:{results}"], folder)
        made, read = results, answers_of_tests
    else:
        done = programs.run("isoshard", [*words, "--output-dir", str(folder)], folder)
        is_study = part == "study"
        made = folder / ("study.csv" if is_study else "report.json")
        read = answers_of_study if is_study else answers_of_report
    if done.returncode not in (0, 1) and (done.returncode != NOT_RUN or not made.exists()):
        raise CorpusError(
            f"{part}: ended with {done.returncode}; a second call goes on here: "
            f"{done.stderr.strip()[-2000:]}",
            NOT_RUN,
        )
    write_text(folder / "answers.json", json.dumps(read(part, made), indent=1))


def require_same_run(folder: pathlib.Path, programs: Programs) -> None:
    """A folder belongs to one program in one setting."""
    digest = hashlib.sha256(programs.path("isoshard").read_bytes()).hexdigest()
    made_by = {"setting": programs.setting, "isoshard": digest}
    stamp = folder / "made_by.json"
    if stamp.exists() and read_json(stamp) != made_by:
        raise CorpusError(
            f"{folder} must be of this isoshard in the setting {programs.setting}, and is of "
            "another: remove it, or name another --output-dir",
            2,
        )
    write_text(stamp, json.dumps(made_by))


def run_parts(folder: pathlib.Path, programs: Programs, patterns: str) -> list[str]:
    """Runs all parts that fit and that an earlier call has not finished. Returns their names."""
    require_same_run(folder, programs)
    parts = parts_of(programs, folder)
    chosen = [part for part in parts if fits(part, patterns)]
    if not chosen:
        raise CorpusError(f"--only {patterns} fits none of {', '.join(parts)}", 2)
    for part in chosen:
        target = folder / "parts" / part
        if (target / "answers.json").exists():
            continue
        target.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        run_part(part, parts[part], programs, target)
        seconds = time.monotonic() - start
        count = len(read_json(target / "answers.json"))
        print(f"{part}: {count} answers in {seconds:.0f} s", flush=True)
    return chosen


def answers_of_run(folder: pathlib.Path) -> dict[str, Answer]:
    """The answers of all finished parts."""
    answers: dict[str, Answer] = {}
    for file in sorted((folder / "parts").rglob("answers.json")):
        answers |= read_json(file)
    if not answers:
        raise CorpusError(f"{folder}: has no finished part of tools/corpus run")
    return answers
