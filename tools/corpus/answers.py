# SPDX-License-Identifier: Apache-2.0
"""What a verdict says, as data that stays the same while its words and its code change.

An answer is a flat table: field -> value. Sentences become a template, in which numbers are "#" and
dotted names of tensors are "@", with the numbers and the names in fields of their own.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import pathlib
import re
from collections.abc import Callable

SCHEMA = 1
DIGITS = 3  # significant ones of a number in a sentence

Answer = dict[str, object]

_NAME = re.compile(r"\b(?:[A-Za-z_]\w*(?:\.\w+)+|\d+(?:\.\w+)*\.[A-Za-z_]\w*)")
# No part of a word: "tp2" and "fp32" are names.
_NUMBER = re.compile(r"(?<!\w)(?<!\w\.)[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?!\w)")
_DIGEST = re.compile(r"\b[0-9a-f]{16,64}\b")
# "PLACE: CAUSE; the same for 3 of 15 (NAMES); forward right"
_CAUSE = re.compile(
    r"(?:(?P<at>[^:]*): )?(?P<cause>.*?)(?:; the same for .*?)?(?:; forward (?P<forward>\w+))?"
)
_RULE = re.compile(r" \[([a-z_]+)\]$")
_PLACE = re.compile(r"^.* \(step \d+\): ")


class CorpusError(Exception):
    """A message for a user, and the exit code of the program."""

    def __init__(self, message: str, exit_code: int = 3) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def rounded(number: object) -> object:
    """A number, or each of a list, with the digits that are compared; anything else as it is."""
    if isinstance(number, list):
        return [rounded(one) for one in number]
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return number
    return float(f"{number:.{DIGITS}g}")


def text_fields(field: str, text: str) -> Answer:
    """A sentence as template, numbers and names."""
    if not text:
        return {field: ""}
    names: list[str] = []

    def name_of(found: re.Match[str]) -> str:
        names.append(found.group())
        return "@"

    numbers: list[object] = []

    def number_of(found: re.Match[str]) -> str:
        numbers.append(rounded(float(found.group())))
        return "#"

    template = _NAME.sub(name_of, _DIGEST.sub("DIGEST", text))
    fields: Answer = {field: _NUMBER.sub(number_of, template)}
    if numbers:
        fields[field + ".numbers"] = numbers
    if names:
        fields[field + ".names"] = names
    return fields


def cause_fields(text: str) -> Answer:
    """A cause in words: where it is seen, what it is, and what is said of the forward pass.

    How many other tensors have the same cause is a count, and left out.
    """
    parts = _CAUSE.fullmatch(text)
    if parts is None:
        return text_fields("cause", text)
    fields = text_fields("cause", parts["cause"])
    return fields | {f"cause.{k}": parts[k] for k in ("at", "forward") if parts[k]}


def id_fields(field: str, value: dict) -> Answer:
    """A finding, cause or rule of a report as id, named numbers and named words."""
    fields: Answer = {field: value["id"]}
    for name, given in {**(value.get("numbers") or {}), **(value.get("words") or {})}.items():
        fields[f"{field}.{name}"] = rounded(given)
    return fields


def translated(answer: Answer, renamed: dict) -> Answer:
    """An answer in which a sentence that `renamed` has became an id.

    `renamed` maps a template to {"id": ID, "numbers": [NAME or null, ...]}: the names of its
    numbers in their order, or null for a number that reports no longer have. A string is an id.
    """
    result = dict(answer)
    for field in ("finding", "cause", "rule", "reason"):
        new = renamed.get(answer.get(field) or "")
        if new is None:
            continue
        new = {"id": new} if isinstance(new, str) else new
        numbers = result.pop(field + ".numbers", [])
        for left_out in ("names", "at", "forward"):
            result.pop(f"{field}.{left_out}", None)
        names = new.get("numbers", [])
        result |= {f"{field}.{n}": v for n, v in zip(names, numbers) if n is not None}
        result[field] = new["id"]
    return result


def answer_of_case(case: dict) -> Answer:
    """One object of a report's "cases"."""
    answer: Answer = {"status": case["status"], "strength": case.get("strength")}
    if case.get("reference"):
        answer["against"] = case["reference"]
    findings = case.get("findings") or []
    if not findings:
        # Nothing else says why: a vacuous verdict, or processes that broke down.
        if case["status"] != "conforms":
            answer |= text_fields("reason", case.get("reason") or "")
        return answer
    first = findings[0]
    answer |= {
        "step": first["step"],
        "kind": first["kind"],
        "name": first["name"],
        "call": first["call"],
        "stage": first["stage"],
        "ranks": first["ranks"],
    }
    # Ids where a report has them, else sentences.
    if first.get("finding"):
        answer |= id_fields("finding", first["finding"])
    else:
        answer |= text_fields("finding", _PLACE.sub("", first["what"]))
    if first.get("cause"):
        answer |= id_fields("cause", first["cause"])
    else:
        answer |= cause_fields(first["diagnosis"])
    if case.get("rule"):
        answer |= id_fields("rule", case["rule"])
    return answer


def answer_of_refusal(exit_code: int, message: str) -> Answer:
    """A run that was not judged: what the program wrote to stderr."""
    text = " ".join(line for line in message.strip().splitlines() if line.strip())
    answer: Answer = {"status": "refused", "exit_code": exit_code}
    # The line ends with the rule's id, if there is one.
    if rule := _RULE.search(text):
        return answer | {"rule": rule.group(1)}
    return answer | text_fields("rule", text)


def unstable_fields(answers: list[Answer]) -> list[str]:
    """Fields that differ between recordings of one run."""
    fields = sorted(set().union(*answers))
    return [f for f in fields if any(a.get(f) != answers[0].get(f) for a in answers[1:])]


@dataclasses.dataclass
class AnswerFile:
    """Recorded answers, and why each recording over earlier ones was made."""

    path: pathlib.Path
    answers: dict[str, Answer] = dataclasses.field(default_factory=dict)
    unstable: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    recordings: list[dict] = dataclasses.field(default_factory=list)

    @staticmethod
    def read(path: pathlib.Path) -> AnswerFile:
        """Reads the file; without a file, the result has no answers."""
        if not path.exists():
            return AnswerFile(path)
        content = read_json(path)
        if content.get("schema") != SCHEMA:
            raise CorpusError(f"{path}: schema must be {SCHEMA}, got {content.get('schema')}")
        return AnswerFile(path, content["answers"], content["unstable"], content["recordings"])

    def write(self) -> None:
        """One line for each answer, so that a change is a line of the diff."""

        def table(name: str, rows: dict) -> str:
            lines = [f"  {json.dumps(key)}: {json.dumps(rows[key])}" for key in sorted(rows)]
            return f'"{name}": {{\n' + ",\n".join(lines) + "\n}"

        recordings = ",\n".join("  " + json.dumps(item) for item in self.recordings)
        parts = [
            f'"schema": {SCHEMA}',
            f'"recordings": [\n{recordings}\n]',
            table("unstable", self.unstable),
            table("answers", self.answers),
        ]
        write_text(self.path, "{" + ",\n".join(parts) + "}\n")

    def record(self, settings: list[dict[str, Answer]], because: str | None) -> list[str]:
        """Takes the answers of the first setting and marks what differs in the others.

        Returns the ids whose answers changed. Later settings may lack ids: parts that were not
        repeated.
        """
        main = settings[0]
        keys = sorted(self.answers.keys() | main.keys())
        changed = [key for key in keys if self.answers.get(key) != main.get(key)]
        if self.answers and changed and not because:
            raise CorpusError(
                f"{self.path} has answers already, and {len(changed)} of them change "
                f"({', '.join(changed[:5])}): say why with --because TEXT",
                2,
            )
        unstable = {}
        for key, answer in main.items():
            others = [setting[key] for setting in settings[1:] if key in setting]
            known = self.unstable.get(key, []) if self.answers.get(key) == answer else []
            fields = sorted({*unstable_fields([answer, *others]), *known})
            if fields:
                unstable[key] = fields
        if changed or unstable != self.unstable:
            because = because or ("first recording" if not self.answers else "more unstable fields")
            self.recordings.append({"because": because, "changed": len(changed), "ids": changed})
            if len(self.recordings) == 1:
                self.recordings[0].pop("ids")  # all of them
        self.answers, self.unstable = main, unstable
        return changed

    def differences(
        self, answers: dict[str, Answer], renamed: dict, is_asked: Callable[[str], bool]
    ) -> list[str]:
        """One line for each field that is not as recorded, of the ids that are asked for."""
        lines = []
        for key in sorted(filter(is_asked, self.answers.keys() | answers.keys())):
            wanted, got = self.answers.get(key), answers.get(key)
            if wanted is None or got is None:
                what = "was recorded, and is not judged now" if got is None else "was not recorded"
                lines.append(f"{key}: {what}")
                continue
                continue
            wanted = translated(wanted, renamed)
            left_out = set(self.unstable.get(key, []))
            for field in sorted((wanted.keys() | got.keys()) - left_out):
                value = wanted.get(field)
                if value != got.get(field):
                    lines.append(f"{key}: {field} must be {value!r}, got {got.get(field)!r}")
        return lines


def fits(name: str, patterns: str) -> bool:
    """Whether one of several patterns with commas between them fits."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split(","))


def read_json(path: pathlib.Path) -> dict:
    """A JSON file.   Errors   CorpusError that names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CorpusError(f"{path}: is no JSON: {error}") from error


def write_text(path: pathlib.Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
