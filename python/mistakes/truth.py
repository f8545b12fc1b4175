# SPDX-License-Identifier: Apache-2.0
"""What a person knows of a mistake, whatever a verdict on it says."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

#: What a person calls the first wrong record -> the stages of report.json that it may be in.
STAGES = {
    "data": ("data ids",),
    "weights": ("weights as read",),
    "forward": ("forward",),
    "loss": ("forward",),
    "gradient": ("activation gradient", "parameter gradient"),
    "norm": ("grad norm", "clipped gradient"),
    "update": ("step settings", "optimizer state", "parameter after step", "replica drift"),
    "nothing": (),
}


@dataclass(frozen=True)
class Mistake:
    """One mistake of one loop."""

    loop: str
    name: str
    #: One sentence: what is wrong.
    wrong: str
    #: Kind of the first wrong record, a key of STAGES; "nothing" for a run that conforms.
    kind: str
    #: Patterns of its name, with commas between: that of a parameter, a module or an input; "all"
    #: where any is right.
    tensor: str
    #: The cause that a reader calls right.
    cause: str
    #: The first wrong step.
    step: int = 0
    #: Steps that must be recorded to see it.
    judged_steps: int = 2

    def __post_init__(self) -> None:
        """Raises ValueError if the kind is unknown."""
        if self.kind not in STAGES:
            raise ValueError(f"kind must be one of {', '.join(STAGES)}, got {self.kind!r}.")

    @property
    def id(self) -> str:
        """Loop and name."""
        return f"{self.loop}/{self.name}"

    @property
    def expects(self) -> str:
        """The status that the verdict must have."""
        return "conforms" if self.kind == "nothing" else "diverges"

    def is_at(self, stage: str, name: str, step: int) -> bool:
        """Whether a first wrong tensor is the one that a person names."""
        if stage not in STAGES[self.kind] or step != self.step:
            return False
        if self.kind in ("forward", "loss") and (name == "loss") != (self.kind == "loss"):
            return False
        patterns = self.tensor.split(", ")
        return self.tensor == "all" or any(fnmatchcase(name, p) for p in patterns)
