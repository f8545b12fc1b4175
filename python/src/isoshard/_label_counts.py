# SPDX-License-Identifier: Apache-2.0
"""Counts the labels that torch's losses take, for whoever asks what a mean was taken over."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

#: Losses of torch.nn.functional whose labels are class indices, of which one may be ignored.
LOSSES = ("cross_entropy", "nll_loss")
_inside = threading.local()  # depth: 1 while a function of LOSSES runs in this thread


class LabelCounts:
    """The number of labels that count, by micro-batch of the current step."""

    def __init__(self) -> None:
        self._counts: dict[int, list[torch.Tensor]] = {}
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
            if torch.compiler.is_compiling() or getattr(_inside, "depth", 0) > 0:
                return original(*args, **kwargs)  # a TorchFunctionMode calls this one again
            if (now := self.micro()) is not None:
                given = signature.bind(*args, **kwargs).arguments
                self._see(now, given.get("target"), given.get("ignore_index", -100))
            _inside.depth = 1
            try:
                return original(*args, **kwargs)
            finally:
                _inside.depth = 0

        return call

    def _see(self, micro: int, target: Any, ignored: int) -> None:
        """Counts class indices; other labels, and tensors that stand for others, are left out."""
        is_plain = type(target) is torch.Tensor and not target.is_meta
        if not is_plain or torch._C._functorch.is_functorch_wrapped_tensor(target):
            return
        if not target.is_floating_point():
            self._counts.setdefault(micro, []).append((target != ignored).sum())

    def forget(self) -> None:
        """Forgets the passes of an attempt at a step."""
        self._counts = {}

    def take(self) -> list[int]:
        """Hands over the counts of the step that ends, in the order of its micro-batches."""
        counts, self._counts = self._counts, {}
        return [sum(int(number) for number in counts[micro]) for micro in sorted(counts)]
