# SPDX-License-Identifier: Apache-2.0
"""Installs isoshard with pip into the Python that runs this file.

Environment: INPUT_WHEEL names what pip installs. If it is empty, `./isoshard wheel` builds the
wheel from the checkout of this action.
Output: `scripts`, the folder of this Python's programs.
Exit code: 0, or 4 if the wheel cannot be built or installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import workflow

_ROOT = Path(__file__).resolve().parents[3]


def main() -> int:
    """Installs, and returns the exit code of the step."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("RUNNER_TEMP")) as folder:
        wheel = os.environ.get("INPUT_WHEEL", "").strip() or _build(Path(folder))
        if wheel is None:
            return workflow.FAILED
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
        if subprocess.run([*command, "--", wheel]).returncode != 0:
            workflow.annotate(
                "error",
                f"pip must be able to install {wheel} into {sys.executable}, and failed (see the "
                "log). Check the inputs wheel and python; actions/setup-python makes a Python that "
                "can be written.",
            )
            return workflow.FAILED
    workflow.set_output("scripts", sysconfig.get_path("scripts"))
    return workflow.OK


def _build(folder: Path) -> str | None:
    environment = {**os.environ, "ISOSHARD_PYTHON": sys.executable, "ISOSHARD_SUDO": "1"}
    command = [str(_ROOT / "isoshard"), "wheel", str(folder)]
    code = subprocess.run(command, env=environment).returncode
    wheels = [str(path) for path in folder.glob("*.whl")]
    if code == 0 and len(wheels) == 1:
        return wheels[0]
    workflow.annotate(
        "error",
        f"./isoshard wheel must build one wheel, got {len(wheels)} and exit code {code} (see the "
        "log). You can build it in a job of its own and name it with the input wheel.",
    )
    return None


if __name__ == "__main__":
    sys.exit(main())
