# SPDX-License-Identifier: Apache-2.0
"""Where the time of `isoshard judge` goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Seconds:
    """Wall-clock seconds by part of the work."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Adds the time of a block to a part."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - start

    def total(self) -> float:
        """Of all parts that have ended."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.parts.items())
        return f"seconds: {parts}; together {self.total():.1f}"
