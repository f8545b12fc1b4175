# SPDX-License-Identifier: Apache-2.0
"""Frozen tables of 16 bits: parameters of which forward passes only copy rows.

A model in fp32 that looks rows up in a frozen table of 16 bits rounds nothing to 16 bits. Its
tolerances are those of fp32, and perturbed runs leave the table as it is: an ulp of it would hide
what the model rounds. Which parameters are such tables is seen in the reference's forward passes,
so it does not matter how a module looks rows up.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ._calls import is_own
from ._dtensor import is_dtensor

_NARROW = 2  # bytes of an element
#: Functions whose results are elements of their arguments, or a constant.
_COPIES = frozenset(
    "__get__ __getitem__ cat chunk clone concat contiguous detach embedding expand expand_as "
    "flatten flip gather index_select masked_fill masked_select movedim narrow permute repeat "
    "repeat_interleave reshape roll split squeeze stack swapaxes t take take_along_dim transpose "
    "unbind unflatten unsqueeze view where".split()
)
_CASTS = frozenset("bfloat16 double float half to type type_as".split())


class TableWatch(TorchFunctionMode):
    """Sees each function of torch that a forward pass calls, from `begin` to `end`.

    What it does not know counts as arithmetic, and so does what is compiled, so that a table it
    does not find makes tolerances wider, never narrower.
    """

    def __init__(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self._frozen = {
            _storage_of(p): (n, p.numel()) for n, p in parameters if _is_narrow(p)
        }
        self._copies_only = True
        self._depth = 0  # of forward passes within each other
        self._has_begun = self._is_closed = False
        self._compiled = _compiled_frames()

    @property
    def is_exact(self) -> bool:
        """Whether all parameters of 16 bits are tables, and nothing was rounded to 16 bits."""
        has_compiled = _compiled_frames() != self._compiled
        return self._has_begun and self._copies_only and not has_compiled

    @property
    def found(self) -> set[str]:
        """Names of the tables: of all parameters of 16 bits, or of none."""
        return {name for name, _ in self._frozen.values()} if self.is_exact else set()

    def begin(self) -> None:
        """A forward pass begins."""
        if not self._is_closed:
            self._has_begun = True
            self._depth += 1
            self.__enter__()

    def end(self) -> None:
        """A forward pass ends, or has failed."""
        if self._depth > 0:
            self._depth -= 1
            self.__exit__(None, None, None)

    def close(self) -> None:
        """Ends what is under way, for good."""
        self._is_closed = True
        while self._depth > 0:
            self.end()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.compiler.is_compiling() or not self._copies_only or is_own():
            return result
        given = [a for a in tree_leaves((args, kwargs)) if _is_real(a)]
        made = [t for t in tree_leaves(result) if _is_real(t)]
        name = getattr(func, "__name__", "")
        self._copies_only = self._is_copy(name, given, made, kwargs or {})
        return result

    def _is_copy(
        self,
        name: str,
        given: list[torch.Tensor],
        made: list[torch.Tensor],
        kwargs: dict[str, Any],
    ) -> bool:
        """Whether a call rounds nothing to 16 bits, and computes with no frozen parameter."""
        if name in ("__set__", "__setitem__") or (name.endswith("_") and name[-2:] != "__"):
            return not any(map(_is_narrow, given[:1]))
        if name == "embedding" and kwargs.get("max_norm") is not None:
            return False  # writes its table
        if name in _COPIES:
            return True
        sizes = [self._size_of(t) for t in given]
        if name in _CASTS:
            # A whole table that is cast is a weight; its rows or a part of it may be looked up.
            is_rounded = any(map(_is_narrow, made)) and not all(map(_is_narrow, given[:1]))
            return not is_rounded and (not given or given[0].numel() != sizes[0])
        return not made or not (any(sizes) or (given and any(map(_is_narrow, made))))

    def _size_of(self, tensor: torch.Tensor) -> int:
        """Number of elements of the frozen parameter whose memory a tensor shares, or 0."""
        return self._frozen.get(_storage_of(tensor), ("", 0))[1]


def watch_of(parameters: Iterable[tuple[str, torch.Tensor]]) -> TableWatch | None:
    """None if a parameter of 16 bits is trained, or if no parameter or every one has 16 bits."""
    named = [(n, p) for n, p in parameters if p.is_floating_point()]
    narrow = [p for _, p in named if _is_narrow(p)]
    if not narrow or len(narrow) == len(named) or any(is_dtensor(p) for _, p in named):
        return None
    return None if any(p.requires_grad for p in narrow) else TableWatch(named)


def _storage_of(tensor: torch.Tensor) -> int:
    """Where its memory begins; 0 for a tensor that has none of its own, as under torch.vmap."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def _compiled_frames() -> int:
    """How many functions torch.compile has looked at in this process."""
    module: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if module is None else int(module.counters["frames"]["total"])


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_narrow(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() <= _NARROW
