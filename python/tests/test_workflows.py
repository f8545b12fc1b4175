# SPDX-License-Identifier: Apache-2.0
"""The workflows of the project are what GitHub's schema asks for, and its jobs are YAML."""

import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
pytestmark = pytest.mark.quick

TREE = pathlib.Path(__file__).parents[2]
FOLDER = TREE / ".github" / "workflows"


def check(*files: pathlib.Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema"]
    command += ["--builtin-schema", "vendor.github-workflows", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True)


def test_every_workflow_fits_the_schema() -> None:
    workflows = sorted(FOLDER.glob("*.yml"))
    assert {file.name for file in workflows} >= {"ci.yml", "nightly.yml", "golden.yml", "gpu.yml"}

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


def test_jobs_of_clusters_are_yaml() -> None:
    import ruamel.yaml  # check-jsonschema brings it

    reader = ruamel.yaml.YAML(typ="safe")
    jobs = {file.name: reader.load(file) for file in (TREE / "examples/cluster").glob("*.yaml")}

    assert set(jobs) == {"job_ddp.yaml", "job_autotp.yaml", "job_fsdp.yaml", "mpijob.yaml"}
    assert jobs["mpijob.yaml"]["kind"] == "MPIJob"
    for name, job in jobs.items():
        assert name == "mpijob.yaml" or job["entrypoint"].startswith("isoshard train "), name
