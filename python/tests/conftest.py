# SPDX-License-Identifier: Apache-2.0
"""Tests run offline on one thread; those that need isoshard-judge are skipped without it.

Markers: `live` tests need frameworks (python/live-requirements.txt); `quick` ones are whole files
that start no ranks and take some seconds together. All others start ranks.
"""

from __future__ import annotations

import os

import pytest
import torch

from isoshard import RunError, _program

torch.set_num_threads(1)
#: Tests of precisions name theirs; all others would take twice as long with both.
os.environ.setdefault("ISOSHARD_PRECISION", "native")
_QUICK = (
    "test_parts.py",
    "test_places.py",
    "test_stored_bundles.py",
    "test_micro_batches.py",
    "test_transformers_preset.py",
    "test_matrix_cases.py",
)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What programs say is compared, not how they break it into lines."""
    monkeypatch.setenv("COLUMNS", "100000")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in _QUICK:
            item.add_marker("quick")


@pytest.fixture(scope="session")
def judge_program() -> str:
    try:
        return str(_program.find())
    except RunError as error:
        pytest.skip(str(error))
