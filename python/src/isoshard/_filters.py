# SPDX-License-Identifier: Apache-2.0
"""Recording a part of a run: names that fit patterns, and chosen steps."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import UsageError


class Filter:
    """What of a run is recorded; what is left out is counted.

    Data ids of recorded steps are never left out, because they are compared first. No choice of
    steps leaves out the parameters that a run begins with.
    """

    def __init__(self, only: Sequence[str], at_steps: Sequence[int]) -> None:
        self.only, self.at_steps = list(only), sorted(set(at_steps))
        self.left_out = 0

    def drops(self, kind: str, name: str, step: int, is_first_call: bool) -> bool:
        """Whether a record is left out. It is counted if its name is the reason."""
        is_read = kind == "param" and step == 0 and is_first_call
        if self.at_steps and step not in self.at_steps and not is_read:
            return True
        if not self.only or kind == "data_id" or fits(kind, name, self.only):
            return False
        self.left_out += 1
        return True

    def check(self, judging: Mapping[str, Any]) -> None:
        """Small gradients rule which elements of Adam's steps are judged, from the first on."""
        if not judging.get("mask_small_gradients"):
            return
        has_all = not self.at_steps or self.at_steps == list(range(len(self.at_steps)))
        if not has_all:
            raise UsageError(
                "Steps that are left out must not come before recorded ones where the optimizer "
                f"is Adam's, got steps {', '.join(map(str, self.at_steps))}: which elements of a "
                "step are judged follows from all gradients before it. Record from step 0 on."
            )
        kinds = [pattern.partition("/")[0] for pattern in self.only]
        has_steps = any(fnmatch.fnmatchcase(k, p) for k in ("param", "optimizer") for p in kinds)
        if has_steps and not {"*/*", "grad/*"} & set(self.only):
            raise UsageError(
                "Gradients must be recorded with what Adam's steps change, got only "
                f"{', '.join(self.only)}: which elements of a step are judged follows from them. "
                "Add grad/*."
            )

    def to_json(self) -> dict[str, Any] | None:
        """As manifest.json has it; None where nothing is left out."""
        if not self.only and not self.at_steps:
            return None
        return {"only": self.only, "steps": self.at_steps, "records": self.left_out}


def fits(kind: str, name: str, patterns: Sequence[str]) -> bool:
    """Whether KIND/NAME fits one of the patterns."""
    return any(fnmatch.fnmatchcase(f"{kind}/{name}", pattern) for pattern in patterns)
