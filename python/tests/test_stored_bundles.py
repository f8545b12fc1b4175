# SPDX-License-Identifier: Apache-2.0
"""fixtures/frameworks is what record_bundles would record: its cases, faults and edits fit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bundle_cases import CASES
from live_runs import EXAMPLES, edited
from record_bundles import BY_HAND, EXPECTED, FOLDER, LIMIT, WRITER, _compact, size_of


def test_each_folder_is_a_case_and_each_case_has_a_folder() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*CASES, BY_HAND}


@pytest.mark.parametrize("name", CASES)
def test_what_is_expected_are_the_planted_faults(name: str) -> None:
    expected = json.loads((FOLDER / name / EXPECTED).read_text())

    assert set(expected["runs"]) == {"right", *(f"faulty_{fault}" for fault in CASES[name].faults)}
    assert expected["options"]["--mesh"] == CASES[name].mesh
    assert size_of(FOLDER / name) <= LIMIT


@pytest.mark.parametrize("name", CASES)
def test_edits_fit_the_examples(name: str) -> None:
    case = CASES[name]
    script = edited((EXAMPLES / case.script).read_text(), case.edits)
    for fault in case.faults.values():
        assert edited(script, fault.edits) != script
    for helper, edits in case.helpers.items():
        edited((EXAMPLES / helper).read_text(), edits)


def test_the_writer_without_a_framework_has_a_hundred_lines_of_the_standard_library() -> None:
    text = WRITER.read_text()
    modules = {line.split()[1] for line in text.splitlines() if line.startswith(("import", "from"))}

    assert len(text.splitlines()) <= 100
    assert modules <= sys.stdlib_module_names


def test_the_writer_writes_the_same_bytes_each_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        subprocess.run([sys.executable, "-I", "-S", str(WRITER), str(tmp_path / name)], check=True)
    files = [path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*")]

    assert len(files) > 20
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_what_a_writer_may_leave_out_is_left_out() -> None:
    whole = {"local_offset": [0], "global_offset": [0], "size": [4]}
    part = {"local_offset": [0], "global_offset": [2], "size": [2]}
    record = {"kind": "param", "name": "w", "call": 0, "dtype": "fp32", "global_shape": [4]}
    content = {
        "run": "random",
        "records": [
            {**record, "local_shape": [4], "boxes": [whole]},
            {**record, "local_shape": [2], "boxes": [part], "call": 1},
        ],
    }

    compact = json.loads(_compact(content, "named"))

    named = {"kind": "param", "name": "w", "global_shape": [4]}
    assert compact == {"run": "named", "records": [named, {**named, "call": 1, "boxes": [part]}]}
