# SPDX-License-Identifier: Apache-2.0
"""Which dtype's roundings a run has."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from ._safetensors import dtype_name

if TYPE_CHECKING:
    from ._frozen_tables import TableWatch

_BUFFER = ".buffer"
#: To be asked for by identity: in the float64 mode it is equal to float64.
_FLOAT32 = torch.float32


def is_float32(dtype: torch.dtype) -> bool:
    """Whether a script asked for float32: in the float64 mode a dtype says so in its text only."""
    return str(dtype) == "torch.float32"


class Dtypes:
    """The coarsest dtype that rounds what is recorded.

    The judge takes the coarsest of all records, and allows for its roundings everywhere. That is
    wrong twice. Inputs, frozen tables (_frozen_tables), and buffers that no step writes are never
    rounded: images in bf16 or a table in fp16 make nothing in an fp32 model less exact.
    And a model in fp64 whose loss is computed in fp32, as transformers' is, has gradients that are
    rounded as the loss is, though no recorded tensor shows it.
    """

    def __init__(self) -> None:
        #: Those of the losses from which backward passes began.
        self.losses: set[torch.dtype] = set()
        #: Looks for frozen tables, where there may be some.
        self.tables: TableWatch | None = None
        self._recorded: set[torch.dtype] = set()  # floating ones, of all but numbers and inputs
        self._coarsest: torch.dtype | None = None
        self._of_inputs: torch.dtype | None = None
        self._of_values: torch.dtype | None = None  # of 16 bits: parameters and activations
        self._of_buffers: torch.dtype | None = None
        self._began: dict[str, torch.Tensor] = {}
        self._has_changed = False

    def begin(self, name: str, buffer: torch.Tensor) -> None:
        """Keeps a buffer of 16 bits as it is before the first step."""
        if buffer.is_floating_point() and buffer.element_size() <= 2:
            self._began[name] = buffer.detach().clone()

    def after_step(self, name: str, buffer: torch.Tensor) -> None:
        """Looks whether a step changed it."""
        if not buffer.is_floating_point() or buffer.element_size() > 2:
            return
        began = self._began.get(name)
        self._has_changed |= began is None or not torch.equal(began, buffer.detach())

    def see(self, kind: str, name: str, dtype: torch.dtype) -> None:
        """Counts a record."""
        if not dtype.is_floating_point:
            return
        if kind == "data_id":
            self._of_inputs = coarser(self._of_inputs, dtype)
            return
        if kind != "scalar":
            self._recorded.add(dtype)
        if kind == "optimizer" and name.endswith(_BUFFER):
            self._of_buffers = coarser(self._of_buffers, dtype)
        elif kind in ("param", "activation") and dtype.itemsize <= 2:
            self._of_values = coarser(self._of_values, dtype)
        else:
            self._coarsest = coarser(self._coarsest, dtype)

    def judging(self) -> dict[str, Any]:
        """What the manifest says of it: nothing where the records alone say it."""
        # A loss in 16 bits alone says nothing: floors of all tensors would be those of 16 bits.
        is_narrow = any(dtype is _FLOAT32 for dtype in self.losses)
        if self._recorded == {torch.float64} and is_narrow:
            return {"coarsest_dtype": "fp32"}
        of_values = None if self.tables is not None and self.tables.is_exact else self._of_values
        of_buffers = self._of_buffers if self._has_changed else None
        own = coarsest(self._coarsest, of_values, of_buffers)
        whole = coarsest(own, self._of_values, self._of_buffers, self._of_inputs)
        if own is None or whole is own:
            return {}
        return {"coarsest_dtype": dtype_name(own, "the records")}


def coarsest(*dtypes: torch.dtype | None) -> torch.dtype | None:
    """The one that rounds most; None if there is none."""
    return functools.reduce(coarser, dtypes)


def coarser(a: torch.dtype | None, b: torch.dtype | None) -> torch.dtype | None:
    """The one that rounds more; `a` if both round alike."""
    if a is None or b is None:
        return b if a is None else a
    return b if torch.finfo(b).eps > torch.finfo(a).eps else a
