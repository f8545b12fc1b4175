# SPDX-License-Identifier: Apache-2.0
"""The programs that the corpus calls, and the settings in which their verdicts must not differ."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess

from answers import CorpusError

# Verdicts are recorded in each of them; what differs is unstable.
SETTINGS = {
    "one_thread": {"OMP_NUM_THREADS": "1"},
    "two_threads": {"OMP_NUM_THREADS": "2"},
    "default_kernels": {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default"},
}
NOT_RUN = 4  # exit code of a crash, a hang, a world that broke down


@dataclasses.dataclass(frozen=True)
class Programs:
    """A folder with isoshard and isoshard-judge, and how they are run."""

    folder: pathlib.Path
    setting: str = "one_thread"
    timeout_s: float = 600

    def path(self, name: str) -> pathlib.Path:
        """Errors   CorpusError if it was not built."""
        program = self.folder / name
        if not os.access(program, os.X_OK):
            raise CorpusError(
                f"{program} must be a program, and is not: build it (./isoshard --version), or "
                "name another folder with --bin",
                NOT_RUN,
            )
        return program

    def run(
        self, name: str, words: list[str], cwd: pathlib.Path
    ) -> subprocess.CompletedProcess[str]:
        """Errors   CorpusError if it does not end."""
        # The caller's variables must not decide a verdict.
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("ISOSHARD_", "ATEN_"))}
        command = [str(self.path(name)), *words]
        try:
            return subprocess.run(
                command,
                cwd=cwd,
                env=kept | {"COLUMNS": "100000"} | SETTINGS[self.setting],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self.timeout_s,
            )
        except subprocess.TimeoutExpired as error:
            raise CorpusError(
                f"{' '.join(command)}: did not end within {self.timeout_s:g} s", NOT_RUN
            ) from error
