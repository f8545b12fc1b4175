# SPDX-License-Identifier: Apache-2.0
"""One case of the matrix: what is trained, how it is parallelized, and what is expected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

#: What a case may be expected to do. `defect` and `documented` are runs that differ from one
#: process: by a bug of the framework (docs/reference/found.md), or as its documentation says.
OUTCOMES = ("conforms", "refused", "defect", "documented")


@dataclass(frozen=True)
class Spec:
    """A case. `id` names it, in one line and without spaces."""

    framework: str
    architecture: str
    mesh: tuple[tuple[str, int], ...]
    variant: str = "plain"
    dtype: str = "fp32"
    micro_batches: int = 1
    steps: int = 1
    optimizer: str = "adamw"
    clip: float | None = None
    tied: bool = False
    sizes: str = "even"
    seed: int = 0
    #: Further settings of the architecture's config or of the framework.
    config: tuple[tuple[str, Any], ...] = field(default=())

    @property
    def id(self) -> str:
        """All that tells this case from others."""
        mesh = "x".join(f"{axis}{degree}" for axis, degree in self.mesh)
        parts = [self.framework, self.variant, self.architecture, mesh, self.dtype, self.optimizer]
        parts += [f"mb{self.micro_batches}", f"st{self.steps}"]
        parts += [f"clip{self.clip:g}"] if self.clip is not None else []
        parts += ["tied"] if self.tied else []
        parts += [self.sizes] if self.sizes != "even" else []
        parts += [f"seed{self.seed}"] if self.seed else []
        parts += [f"{key}={value}" for key, value in self.config]
        return "/".join(str(part) for part in parts)

    @property
    def degrees(self) -> dict[str, int]:
        """The mesh as isoshard.check takes it."""
        return dict(self.mesh)

    @property
    def size(self) -> int:
        """How many ranks it needs."""
        return math.prod(degree for _, degree in self.mesh)

    @property
    def data_degree(self) -> int:
        """Over how many ranks the samples are split."""
        return math.prod(n for axis, n in self.mesh if axis in ("dp", "dp_replicate", "dp_shard"))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[self.dtype]


def mesh(**axes: int) -> tuple[tuple[str, int], ...]:
    """Axes from the slowest to the fastest."""
    return tuple(axes.items())


@dataclass(frozen=True)
class Expected:
    """What a case is expected to do, and why, where it is not to conform."""

    outcome: str
    why: str = ""
    #: Words that the verdict (or the error) has; without them the case differs from what is
    #: expected, too.
    words: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError if a word is not known, or a reason is missing."""
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome must be one of {OUTCOMES}, got {self.outcome!r}.")
        if self.outcome != "conforms" and not self.why:
            raise ValueError(f"A case that is {self.outcome} must say why.")


#: Arguments of isoshard.check beside mesh, batch and name.
Arguments = Mapping[str, Any]
