# SPDX-License-Identifier: Apache-2.0
"""libisoshard_ranks.so over ctypes: one rank's comparison with a reference bundle."""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from . import _program
from .errors import BundleError, RecordError, RunError

NAME = "libisoshard_ranks.so"
VARIABLE = "ISOSHARD_RANKS"
_ABI = 1


def find() -> Path:
    """The library: named by ISOSHARD_RANKS, in this package, or beside isoshard-judge."""
    given = os.environ.get(VARIABLE)
    if given:
        if not Path(given).is_file():
            raise RunError(f"{VARIABLE} must name the library {NAME}, got {given}.")
        return Path(given)
    beside = _program.find().parent
    folders = [beside, *sorted(beside.parent.glob("lib*")), *sorted(beside.parent.glob("lib*/*"))]
    for folder in folders:
        for name in (NAME, f"{NAME}.{_ABI}"):
            if (folder / name).is_file():
                return folder / name
    raise RunError(
        f"The library {NAME} must be there, got none in {beside} or its lib folder. Build it "
        f"(ninja isoshard_ranks_c) and set {VARIABLE} to its path."
    )


def _load() -> ctypes.CDLL:
    path = find()
    try:
        library = ctypes.CDLL(str(path))
        abi = library.isoshard_ranks_abi()
    except (OSError, AttributeError) as error:
        raise RunError(f"{path} must be {NAME}, got a file that cannot be used: {error}.") from None
    if abi != _ABI:
        raise RunError(f"{NAME} must have the interface {_ABI}, got {abi}. Build both anew.")
    pointer, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    for name, result, arguments in (
        ("open", pointer, [text]),
        ("close", None, [pointer]),
        ("compared_with", text, [pointer]),
        ("compare", text, [pointer, text, pointer, size]),
        ("error", text, [pointer, text, pointer, size]),
        ("samples", pointer, [pointer, ctypes.POINTER(size)]),
        ("message", text, [pointer]),
    ):
        function = getattr(library, f"isoshard_ranks_{name}")
        function.restype, function.argtypes = result, arguments
    return library


class RanksLibrary:
    """An open reference. Tensors that it gets are contiguous and on the CPU."""

    def __init__(
        self, reference: Path, *, rank: int, run: str, mesh: list[dict[str, object]], purpose: str
    ) -> None:
        self._library = _load()
        options = {
            "reference": str(reference),
            "rank": rank,
            "run": run,
            "mesh": mesh,
            "purpose": purpose,
        }
        self._handle = self._library.isoshard_ranks_open(json.dumps(options).encode())
        if not self._handle:
            raise BundleError(
                f"The reference must be a bundle of one process, got {reference}: "
                f"{self._library.isoshard_ranks_message(None).decode()}"
            )
        said = self._library.isoshard_ranks_compared_with(self._handle)
        self.compared_with: dict[str, Any] = json.loads(said)

    def close(self) -> None:
        """Lets the reference go."""
        if self._handle:
            self._library.isoshard_ranks_close(self._handle)
            self._handle = None

    def _call(self, name: str, record: Mapping[str, Any], tensor: torch.Tensor) -> str:
        function = getattr(self._library, f"isoshard_ranks_{name}")
        text = json.dumps(record).encode()
        result = function(self._handle, text, tensor.data_ptr(), tensor.nbytes)
        if result is None:
            why = self._library.isoshard_ranks_message(self._handle).decode()
            raise RecordError(f"{record['kind']}/{record['name']} cannot be compared: {why}")
        return str(result.decode())

    def compare(self, record: Mapping[str, Any], tensor: torch.Tensor) -> dict[str, Any]:
        """What the record becomes: keep, compared, and unmasked where a mask applies."""
        result: dict[str, Any] = json.loads(self._call("compare", record, tensor))
        return result

    def error(self, record: Mapping[str, Any], tensor: torch.Tensor) -> float:
        """The sum of squared differences; infinite where a value is not finite."""
        text = self._call("error", record, tensor)
        return math.inf if text == "inf" else float.fromhex(text)

    def samples(self, dtype: torch.dtype) -> torch.Tensor:
        """The elements that stand for the tensor that was compared last."""
        size = ctypes.c_size_t()
        at = self._library.isoshard_ranks_samples(self._handle, ctypes.byref(size))
        if not size.value:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(bytearray(ctypes.string_at(at, size.value)), dtype=dtype)
