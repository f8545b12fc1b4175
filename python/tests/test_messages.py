# SPDX-License-Identifier: Apache-2.0
"""What is said, and refused, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from isoshard import RunError, UsageError, _ours
from isoshard import _ranks_library as library
from isoshard._failures import Failure, why_failed
from isoshard._judge import JudgeOptions

ADAMW = {"kind": "adamw", "learning_rate": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
STEP = {"scalar/learning_rate/0": torch.tensor([0.1])}


def test_an_error_that_was_not_written_is_not_the_message(tmp_path: Path) -> None:
    """A process may be ended before it has written its own."""
    (tmp_path / "rank00000.txt").touch()
    (tmp_path / "rank00001.txt").write_text("Dropout must be 0, got 0.1.\n")
    failure = Failure(tmp_path, tmp_path / "logs", [1, 1], None, False, False, 60.0)

    assert why_failed(failure, JudgeOptions(["train.py"])) == "Dropout must be 0, got 0.1."

    (tmp_path / "rank00001.txt").unlink()
    assert "got exit codes [1, 1]" in why_failed(failure, JudgeOptions(["train.py"]))


@pytest.mark.parametrize("content", [b"no library", None])
def test_a_library_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    path = Path(torch.__file__).parent / "lib" / "libc10.so"  # another library
    if content is not None:
        path = tmp_path / library.NAME
        path.write_bytes(content)
    monkeypatch.setenv(library.VARIABLE, str(path))

    with pytest.raises(RunError, match=f"must be {library.NAME}, got a file that cannot be used"):
        library._load()


@pytest.mark.parametrize(
    ("key", "value", "is_usual"),
    [("nesterov", False, True), ("eps", 0.0, False), ("beta1", 0, False), ("momentum", 0, True)],
)
def test_an_optimizer_s_0_is_a_value_too(key: str, value: Any, is_usual: bool) -> None:
    """The program has eps 1e-8: with another one a right run would diverge."""
    training = {"dtype": "fp32", "optimizer": {**ADAMW, key: value}}
    if is_usual:
        assert "--optimizer" in _ours._settings_words(training, [STEP])
        return

    with pytest.raises(UsageError, match=f"needs the optimizer's {key} to be .*, got 0"):
        _ours._settings_words(training, [STEP])


def test_a_model_that_is_called_twice_in_a_step_has_no_reference_of_ours(tmp_path: Path) -> None:
    ids = torch.zeros(2, 4, dtype=torch.int64)
    step = {"data_id/input_ids/0": ids, "data_id/input_ids/1": ids}

    with pytest.raises(UsageError, match="one call of the model.*got data_id/input_ids/1"):
        _ours._write_inputs([step], {}, tmp_path)
