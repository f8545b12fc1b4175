# SPDX-License-Identifier: Apache-2.0
"""Which dtype's roundings a run has."""

from __future__ import annotations

from typing import Any

import torch

from ._names import own_class
from ._safetensors import dtype_name

_BUFFER = ".buffer"
#: To be asked for by identity: in the float64 mode it is equal to float64.
_FLOAT32 = torch.float32


def is_float32(dtype: torch.dtype) -> bool:
    """Whether a script asked for float32: in the float64 mode a dtype says so in its text only."""
    return str(dtype) == "torch.float32"


def only_selects(module: torch.nn.Module) -> bool:
    """Whether a module copies rows of a frozen table, and so rounds nothing."""
    is_lookup = own_class(module) is torch.nn.Embedding
    return is_lookup and module.max_norm is None and not module.weight.requires_grad


def frozen_tables(model: torch.nn.Module) -> set[int]:
    """Parameters of 16 bits that modules only select from, by id."""
    selected: set[int] = set()
    computed: set[int] = set()
    for module in model.modules():
        own = selected if only_selects(module) else computed
        own |= {id(p) for p in module.parameters(recurse=False) if p.element_size() <= 2}
    return selected - computed


class Dtypes:
    """The coarsest dtype that rounds what is recorded.

    The judge takes the coarsest of all records, and allows for its roundings everywhere. That is
    wrong twice. Inputs, frozen tables that rows are copied from, and buffers that no step writes
    are never rounded: images in bf16 or a table in fp16 make nothing in an fp32 model less exact.
    And a model in fp64 whose loss is computed in fp32, as transformers' is, has gradients that are
    rounded as the loss is, though no recorded tensor shows it.
    """

    def __init__(self) -> None:
        #: Those of the losses from which backward passes began.
        self.losses: set[torch.dtype] = set()
        #: Frozen tables, and activations that copy their rows: pairs of kind and name.
        self.copies: set[tuple[str, str]] = set()
        self._recorded: set[torch.dtype] = set()  # floating ones, of all but numbers and inputs
        self._coarsest: torch.dtype | None = None
        self._of_copies: torch.dtype | None = None  # of these, and of inputs
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
            self._of_copies = coarser(self._of_copies, dtype)
            return
        if kind != "scalar":
            self._recorded.add(dtype)
        if kind == "optimizer" and name.endswith(_BUFFER):
            self._of_buffers = coarser(self._of_buffers, dtype)
        elif (kind, name) in self.copies:
            self._of_copies = coarser(self._of_copies, dtype)
        else:
            self._coarsest = coarser(self._coarsest, dtype)

    def judging(self) -> dict[str, Any]:
        """What the manifest says of it: nothing where the records alone say it."""
        # A loss in 16 bits alone says nothing: floors of all tensors would be those of 16 bits.
        is_narrow = any(dtype is _FLOAT32 for dtype in self.losses)
        if self._recorded == {torch.float64} and is_narrow:
            return {"coarsest_dtype": "fp32"}
        own = coarser(self._coarsest, self._of_buffers if self._has_changed else None)
        whole = coarser(coarser(own, self._of_copies), self._of_buffers)
        if own is None or whole is own:
            return {}
        return {"coarsest_dtype": dtype_name(own, "the records")}


def coarser(a: torch.dtype | None, b: torch.dtype | None) -> torch.dtype | None:
    """The one that rounds more; `a` if both round alike."""
    if a is None or b is None:
        return b if a is None else a
    return b if torch.finfo(b).eps > torch.finfo(a).eps else a
