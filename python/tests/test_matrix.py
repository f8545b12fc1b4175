# SPDX-License-Identifier: Apache-2.0
"""Right runs never alarm: more than 200 cases of the matrix, in kept worker processes.

With all cases beside these: python -m matrix --output-dir DIR.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from live_runs import needs

sys.path.append(str(Path(__file__).parents[1]))
from matrix.expect import expected_of
from matrix.families import all_specs
from matrix.run import run_all
from matrix.spec import Spec

pytestmark = needs("transformers", "accelerate", "peft", "cloudpickle")

#: A case of these frameworks takes a second; DeepSpeed's and Megatron-Core's start slower.
FRAMEWORKS = ("ddp", "fsdp2", "tp", "pp", "cp", "hf_tp", "accelerate", "trainer", "peft")
_CASES_OF_EACH = 2


def sample() -> list[tuple[str, Spec]]:
    """Of each framework and architecture some cases on two ranks that are to conform."""
    count: dict[tuple[str, str], int] = {}
    chosen = []
    for name, spec in all_specs():
        key = (spec.framework, spec.architecture)
        is_mlp = spec.architecture == "mlp"
        if spec.framework not in FRAMEWORKS or expected_of(spec).outcome != "conforms":
            continue
        if spec.size > 2 or count.get(key, 0) >= (24 if is_mlp else _CASES_OF_EACH):
            continue
        count[key] = count.get(key, 0) + 1
        chosen.append((name, spec))
    return chosen


def test_right_runs_never_alarm(tmp_path: Path) -> None:
    cases = sample()
    assert len(cases) >= 200

    results = run_all(cases, tmp_path, timeout=120.0, tell=lambda result: None)

    wrong = {r["id"]: r["verdict"] for r in results if not r["is_met"]}
    assert not wrong, json.dumps(wrong, indent=1)
    assert all(r["outcome"] == "conforms" for r in results)
    assert len(results) == len(cases)


@pytest.mark.parametrize("name", ["hrm_text", "apertus", "gemma3_text"])
def test_known_defects_are_found_again(tmp_path: Path, name: str) -> None:
    cases = [
        (family, spec)
        for family, spec in all_specs()
        if spec.framework == "hf_tp"
        and spec.architecture == name
        and expected_of(spec).outcome == "defect"
    ][:1]
    assert cases

    (result,) = run_all(cases, tmp_path, timeout=120.0, tell=lambda result: None)

    assert result["is_met"], result["verdict"]
    assert result["outcome"] == "diverges"
