# SPDX-License-Identifier: Apache-2.0
"""Tests run offline on one thread; those that need isoshard-judge are skipped without it."""

from __future__ import annotations

import pytest
import torch

from isoshard import RunError, _program

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def judge_program() -> str:
    try:
        return str(_program.find())
    except RunError as error:
        pytest.skip(str(error))
