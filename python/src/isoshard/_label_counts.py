# SPDX-License-Identifier: Apache-2.0
"""Counts the labels that torch's losses take, for whoever asks what a mean was taken over."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from ._dtensor import is_dtensor

#: Losses of torch.nn.functional whose labels are class indices, of which one may be ignored.
LOSSES = ("cross_entropy", "nll_loss")


class LabelCounts:
    """The number of labels that count, by micro-batch of the current step."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.is_installed = False
        #: Returns the micro-batch under way, or None while nothing is recorded.
        self.micro: Callable[[], int | None] = lambda: None

    def install(self) -> Callable[[], None]:
        """Has the functions of LOSSES count first; the result puts the original ones back.

        A script may look a loss up before it calls the model, `loss(model(x), y)`.
        """
        originals = {name: getattr(functional, name) for name in LOSSES}
        for name, original in originals.items():
            setattr(functional, name, self._counting(original))
        self.is_installed = True

        def undo() -> None:
            for name, original in originals.items():
                setattr(functional, name, original)
            self.is_installed = False

        return undo

    def _counting(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            if not torch.compiler.is_compiling() and (now := self.micro()) is not None:
                given = signature.bind(*args, **kwargs).arguments
                count = _counted(given.get("target"), given.get("ignore_index", -100))
                self._counts[now] = self._counts.get(now, 0) + count
            return original(*args, **kwargs)

        return call

    def forget(self) -> None:
        """Forgets the passes of an attempt at a step."""
        self._counts = {}

    def take(self) -> list[int]:
        """Hands over the counts of the step that ends, in the order of its micro-batches."""
        counts, self._counts = self._counts, {}
        return [counts[micro] for micro in sorted(counts)]


def _counted(target: Any, ignored: int) -> int:
    """0 where labels are no class indices."""
    is_plain = isinstance(target, torch.Tensor) and not is_dtensor(target)
    if not is_plain or target.is_floating_point() or target.is_meta:
        return 0
    return int((target != ignored).sum())
