# SPDX-License-Identifier: Apache-2.0
"""Where isoshard-judge is looked for, and what installing the package leaves behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from isoshard import RunError, _program

PYTHON = Path(__file__).parents[1]


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_program_is_looked_for_in_five_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "a" / "b" / "isoshard"
    monkeypatch.setattr(_program, "__file__", str(package / "_program.py"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.delenv("ISOSHARD_JUDGE", raising=False)
    clone = tmp_path / "a clone"
    url = json.dumps({"url": (clone / "python").as_uri(), "dir_info": {}})
    distribution = SimpleNamespace(read_text=lambda name: url)
    monkeypatch.setattr(_program.metadata, "distribution", lambda name: distribution)
    with pytest.raises(RunError, match="ISOSHARD_JUDGE"):
        _program.find()
    places = [clone / "build" / "bin", package.parents[2] / "build" / "bin"]
    for place in places:
        root = place.parents[1]
        (root / "python").mkdir(parents=True)
        (root / "isoshard").touch()
        (root / "python" / "pyproject.toml").touch()
    for place in (*places, tmp_path / "path", package / "bin"):  # the later, the stronger
        expected = program(place / "isoshard-judge")
        assert _program.find() == expected
    given = program(tmp_path / "given")
    monkeypatch.setenv("ISOSHARD_JUDGE", str(given))
    assert _program.find() == given


def test_a_build_folder_of_another_project_is_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "python" / "src" / "isoshard"
    monkeypatch.setattr(_program, "__file__", str(package / "_program.py"))
    program(tmp_path / "build" / "bin" / "isoshard-judge")
    assert list(_program._clones()) == []


def test_a_build_leaves_nothing_in_the_tree(tmp_path: Path) -> None:
    """What pip has the build backend do, without a network."""
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path / "python"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "tests", "matrix", ".*")
    shutil.copytree(PYTHON, tree, ignore=ignored)
    before = sorted(tree.rglob("*"))
    for hook in ("get_requires_for_build_wheel()", f"build_wheel({str(tmp_path)!r})"):
        code = f"from setuptools import build_meta; build_meta.{hook}"
        command = [sys.executable, "-c", code]
        subprocess.run(command, cwd=tree, check=True, capture_output=True)

    assert len(list(tmp_path.glob("isoshard-*.whl"))) == 1
    assert sorted(tree.rglob("*")) == before
