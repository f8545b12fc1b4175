# SPDX-License-Identifier: Apache-2.0
"""Recognises the launchers of PyTorch in a command line."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Launch:
    """What a launcher would start: `world_size` processes of one script."""

    launcher: str
    world_size: int
    script: str
    arguments: list[str] = field(default_factory=list)
    is_module: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    adds_local_rank: bool = False

    def single(self) -> Launch:
        """The same script in one process."""
        return Launch(
            self.launcher,
            1,
            self.script,
            self.arguments,
            self.is_module,
            self.environment,
            self.adds_local_rank,
        )


#: Where deepspeed finds its nodes by default.
_HOSTFILE = "/job/hostfile"
#: torchrun reads options from variables that begin so.
_OF_TORCHRUN = "PET_"
#: Options whose meaning is known here. A command with any other one runs untouched.
_TORCHRUN_FLAGS = {"standalone", "module", "m"}
_TORCHRUN_KNOWN = _TORCHRUN_FLAGS | {
    "nnodes",
    "nproc_per_node",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
    "master_addr",
    "master_port",
    "monitor_interval",
}
_ACCELERATE_KNOWN = {
    "multi_gpu",
    "num_processes",
    "num_machines",
    "mixed_precision",
    "dynamo_backend",
}
_ACCELERATE_KNOWN |= {"main_process_port", "main_process_ip", "module", "m", "quiet", "q"}
_ACCELERATE_FLAGS = {"multi_gpu", "module", "m", "quiet", "q"}
_DEEPSPEED_KNOWN = {"num_gpus", "num_accelerators", "num_nodes", "master_port", "master_addr"}
_DEEPSPEED_KNOWN |= {"no_local_rank", "module", "bind_cores_to_rank"}
#: `python -m` starts ranks with them.
_LAUNCHER_MODULES = {
    "accelerate.commands.launch",
    "deepspeed.launcher.runner",
    "isoshard",
    "torch.distributed.launch",
    "torch.distributed.run",
}
_DEEPSPEED_FLAGS = {"no_local_rank", "module", "bind_cores_to_rank"}


def recognise(command: Sequence[str]) -> Launch | None:
    """What the command launches, or None if it must be run untouched.

    None for launchers and options that are not known here, for several nodes, for a launcher of
    another Python installation than this one, and where the environment gives it options.
    """
    words = list(command)
    if not words or any(name.startswith(_OF_TORCHRUN) for name in os.environ):
        return None
    is_own = _is_own_python if words[1:2] == ["-m"] else _is_own_program
    return parse(words) if is_own(words[0]) else None


def asked_world_size(command: Sequence[str]) -> int | None:
    """How many processes a launcher of any Python installation is asked for, if that is known."""
    if any(name.startswith(_OF_TORCHRUN) for name in os.environ):
        return None
    launch = parse(list(command))
    return None if launch is None else launch.world_size


def parse(words: list[str]) -> Launch | None:
    """What a launcher of any Python installation starts; None if it is not known."""
    if len(words) >= 3 and words[1] == "-m":
        if words[2] == "torch.distributed.run":
            return _torchrun(words[3:])
        if words[2] == "accelerate.commands.launch":
            return _accelerate(words[3:])
        return None
    name = Path(words[0]).name if words else ""
    if name == "torchrun":
        return _torchrun(words[1:])
    if name == "accelerate" and words[1:2] == ["launch"]:
        return _accelerate(words[2:])
    if name == "deepspeed":
        return _deepspeed(words[1:])
    return None


def script_of(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words after `python` that name a command's script (SCRIPT, or -m MODULE), its arguments.

    Both are empty where the script is not known.
    """
    launch = parse(list(command)) or plain_python(command)
    if launch is not None:
        script = ["-m", launch.script] if launch.is_module else [launch.script]
        return script, list(launch.arguments)
    at = script_at(command)
    return ([], []) if at is None else ([command[at]], list(command[at + 1 :]))


def plain_python(command: Sequence[str]) -> Launch | None:
    """What `python SCRIPT` or `python -m MODULE` starts by itself, with no launcher; else None."""
    words = list(command)
    while len(words) > 2 and words[1] in ("-u", "-B", "-O"):
        del words[1]
    if len(words) < 2 or not re.fullmatch(r"python[\d.]*", Path(words[0]).name):
        return None
    if words[1] == "-m" and len(words) > 2 and words[2] not in _LAUNCHER_MODULES:
        return Launch("python", 1, words[2], words[3:], is_module=True)
    return Launch("python", 1, words[1], words[2:]) if words[1].endswith(".py") else None


def is_own(program: str) -> bool:
    """Whether a program is of this Python's installation, or a python that is not on PATH."""
    is_python = re.fullmatch(r"python[\d.]*", program) is not None
    return _is_own_program(program) or (is_python and shutil.which(program) is None)


def script_at(command: Sequence[str]) -> int | None:
    """Where the script is in a command: the first word that ends in .py."""
    for i, word in enumerate(command):
        if word.endswith(".py"):
            return i
    return None


def _is_own_python(word: str) -> bool:
    found = shutil.which(word)
    if found is None or not re.fullmatch(r"python[\d.]*", Path(found).name):
        return False
    return Path(found).parent.resolve() == Path(sys.executable).parent.resolve()


def _is_own_program(word: str) -> bool:
    found = shutil.which(word)
    return (
        found is not None and Path(found).parent.resolve() == Path(sys.executable).parent.resolve()
    )


def _split(
    words: Sequence[str], known: set[str], flags: set[str]
) -> tuple[dict[str, str], list[str]] | None:
    """Options before the script as name -> value ("" of a flag), and the script with its words.

    None where an option is not written out as it is known: prefixes, other dashes, twice.
    """
    options: dict[str, str] = {}
    i = 0
    while i < len(words) and words[i].startswith("-"):
        name, equals, value = words[i].partition("=")
        dashes = "-" if len(name) == 2 else "--"
        name = name.removeprefix(dashes).replace("-", "_")
        is_written_so = name and (len(name) == 1) == (dashes == "-") and not name.startswith("_")
        if not is_written_so or name not in known or name in options:
            return None
        if name in flags and equals:
            return None
        if name not in flags and not equals:
            i += 1
            if i == len(words):
                return None
            value = words[i]
        options[name] = value
        i += 1
    return (options, list(words[i:])) if i < len(words) else None


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch("[1-9][0-9]{0,5}", text) else None


def _torchrun(words: Sequence[str]) -> Launch | None:
    split = _split(words, _TORCHRUN_KNOWN, _TORCHRUN_FLAGS)
    if split is None:
        return None
    options, rest = split
    if options.get("nnodes", "1") not in ("1", "1:1"):
        return None
    number = _number(options.get("nproc_per_node", "1"))
    if number is None:
        return None
    is_module = "module" in options or "m" in options
    return Launch("torchrun", number, rest[0], rest[1:], is_module)


def _accelerate(words: Sequence[str]) -> Launch | None:
    split = _split(words, _ACCELERATE_KNOWN, _ACCELERATE_FLAGS)
    if split is None:
        return None
    options, rest = split
    if options.get("num_machines", "1") != "1":
        return None
    if "multi_gpu" not in options:  # without it accelerate starts one process where no GPU is
        return None
    number = _number(options.get("num_processes", ""))
    if number is None:
        return None
    if any(name.startswith("ACCELERATE_") for name in os.environ):
        return None
    if _has_accelerate_config():
        return None
    precision = options.get("mixed_precision", "no")
    environment = {
        "ACCELERATE_MIXED_PRECISION": precision,
        "ACCELERATE_DYNAMO_BACKEND": options.get("dynamo_backend", "no").upper(),
    }
    is_module = "module" in options or "m" in options
    return Launch("accelerate", number, rest[0], rest[1:], is_module, environment)


def _has_accelerate_config() -> bool:
    """Whether a default configuration would decide more than the command line says."""
    home = os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface"))
    folder = Path(home) / "accelerate"
    return any((folder / f"default_config.{end}").exists() for end in ("yaml", "yml", "json"))


def _deepspeed(words: Sequence[str]) -> Launch | None:
    split = _split(words, _DEEPSPEED_KNOWN, _DEEPSPEED_FLAGS)
    if split is None:
        return None
    options, rest = split
    if Path(_HOSTFILE).exists():
        return None
    if options.get("num_nodes", "1") != "1" or {"num_gpus", "num_accelerators"} <= options.keys():
        return None
    number = _number(options.get("num_gpus", options.get("num_accelerators", "")))
    if number is None:
        return None
    return Launch(
        "deepspeed",
        number,
        rest[0],
        rest[1:],
        "module" in options,
        {"LOCAL_SIZE": str(number)},
        adds_local_rank="no_local_rank" not in options,
    )
