# SPDX-License-Identifier: Apache-2.0
"""The workflows of the project are what GitHub's schema asks for."""

import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
pytestmark = pytest.mark.quick

FOLDER = pathlib.Path(__file__).parents[2] / ".github" / "workflows"


def check(*files: pathlib.Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema"]
    command += ["--builtin-schema", "vendor.github-workflows", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True)


def test_every_workflow_fits_the_schema() -> None:
    workflows = sorted(FOLDER.glob("*.yml"))
    assert {file.name for file in workflows} >= {"ci.yml", "nightly.yml", "golden.yml"}

    result = check(*workflows)

    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("runs-on:", "run-on:"), ("workflow_dispatch:", "workflow_dispach:"), ("- run:", "- runs:")],
)
def test_a_wrong_key_is_found(tmp_path: pathlib.Path, right: str, wrong: str) -> None:
    text = (FOLDER / "nightly.yml").read_text(encoding="utf-8")
    assert right in text
    file = tmp_path / "nightly.yml"
    file.write_text(text.replace(right, wrong), encoding="utf-8")

    assert check(file).returncode == 1
