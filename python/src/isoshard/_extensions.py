# SPDX-License-Identifier: Apache-2.0
"""Where runs build C++ extensions of torch, and locks that a killed run left there.

torch.utils.cpp_extension.load keeps a file `lock` beside an extension, and keeps it open, until it
is built. Other processes wait until the file is gone, without a limit. A process that is killed
meanwhile leaves the file, and all that come later wait for ever. So runs have a folder of this
package's own: an extension is built once for all of them, and what a run leaves there stops nobody
else's.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from pathlib import Path

VARIABLE = "TORCH_EXTENSIONS_DIR"
#: A lock that is released is closed first, and then removed.
_RELEASE_SECONDS = 1.0
_PROCESSES = Path("/proc")
_named: set[Path] = set()  # locks of which the user knows


def variables() -> dict[str, str]:
    """The variable that names the folder to runs; none if the user names one, or none can be made.

    The name has the machine, because only processes of the same one are looked for.
    """
    if os.environ.get(VARIABLE):
        return {}
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        torch_version = importlib.metadata.version("torch")
    except (RuntimeError, importlib.metadata.PackageNotFoundError):  # no home, or no wheel
        return {}
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    name = f"{platform.node()}-{python}-torch{torch_version}"
    folder = cache / "isoshard" / "torch_extensions" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return {}
    return {VARIABLE: str(folder)}


def free(environment: dict[str, str]) -> None:
    """Removes locks that killed runs left in the folder of `variables`.

    The user's own folder may be shared with other machines; there such locks are named.
    """
    own = environment.get(VARIABLE)
    folder = own or os.environ.get(VARIABLE)
    for lock in [] if folder is None else left_locks(Path(folder)):
        if own is not None:
            lock.unlink(missing_ok=True)
        elif lock not in _named:
            _named.add(lock)
            print(
                f"isoshard: no process of this machine holds {lock}; a run that needs this "
                f"extension waits for it. Remove the file, or unset {VARIABLE}.",
                file=sys.stderr,
            )


def left_locks(folder: Path) -> list[Path]:
    """Locks below a folder that no process has open, now and after the time that a release takes.

    None where the system does not say which files are open.
    """
    left = {lock: number for lock in folder.glob("*/lock") if (number := _unheld(lock))}
    if left:
        time.sleep(_RELEASE_SECONDS)
    return [lock for lock, number in left.items() if _unheld(lock) == number]


def _unheld(lock: Path) -> tuple[int, int] | None:
    """Device and number of a file that no process has open; None if one has it, or it is gone."""
    try:
        wanted = lock.stat()
        processes = [path / "fd" for path in _PROCESSES.iterdir() if path.name.isdigit()]
    except OSError:
        return None
    for descriptors in processes:
        try:
            names = os.listdir(descriptors)
        except OSError:  # it has ended, or is another user's
            continue
        for name in names:
            try:
                found = os.stat(descriptors / name)
            except OSError:
                continue
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return None
    return wanted.st_dev, wanted.st_ino
