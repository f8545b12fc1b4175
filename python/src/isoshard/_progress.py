# SPDX-License-Identifier: Apache-2.0
"""What a long run is doing: one line that changes on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

_ON_A_TERMINAL = 1.0  # seconds between two states of the line
_ELSEWHERE = 30.0  # between the first two lines; later ones come ever less often
_CLEAR = "\r\033[K"


class Progress:
    """One run whose steps are written to a folder. `tick` may be called as often as one likes."""

    def __init__(
        self,
        name: str,
        directory: Path,
        steps: int,
        *,
        stream: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.directory, self.steps, self.now = name, directory, steps, now
        self.stream = sys.stderr if stream is None else stream
        self.is_terminal = self.stream.isatty()
        self.begin = now()
        self._next = self.begin + (_ON_A_TERMINAL if self.is_terminal else _ELSEWHERE)
        self._is_shown = False

    def tick(self) -> None:
        """Shows the state if it is time."""
        now = self.now()
        if now < self._next:
            return
        seconds = now - self.begin
        text = f"{self.name}: {seconds:.0f} s, {self._recorded()}"
        if self.is_terminal:
            self._next = now + _ON_A_TERMINAL
            self._is_shown = True
            print(f"{_CLEAR}{text}", end="", file=self.stream, flush=True)
        else:
            self._next = self.begin + 2 * seconds
            print(text, file=self.stream, flush=True)

    def end(self) -> None:
        """Takes the line off a terminal."""
        if self._is_shown:
            print(_CLEAR, end="", file=self.stream, flush=True)
            self._is_shown = False

    def _recorded(self) -> str:
        done = len(list(self.directory.glob("step*/rank00000.done")))
        return f"{done} of {self.steps} steps recorded"
