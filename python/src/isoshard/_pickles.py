# SPDX-License-Identifier: Apache-2.0
"""Loads files of torch.save and the metadata of distributed checkpoints, running no code of them.

A pickle can call any function. So files are loaded with weights_only=True, the few classes of
other packages that checkpoints are known to hold are replaced by inert ones, and everything else is
refused by name unless the caller trusts the file.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from .errors import CheckpointError


class WantsCode(CheckpointError):
    """A pickle names a class or function that is not loaded, because it could run code."""


class Inert:
    """Stands for a class of another package: it keeps what was stored and does nothing."""

    def __init__(self, *values: Any) -> None:
        self.values = values


#: Classes in checkpoints of DeepSpeed, and what stands for them.
_STAND_INS: dict[str, Any] = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Inert,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Inert,
    "deepspeed.utils.tensor_fragment.fragment_address": Inert,
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
}
#: What the metadata of a distributed checkpoint may name: classes without code that runs.
_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict", "defaultdict"},
    "builtins": {"dict", "list", "set", "tuple", "int"},
}


_WANTED = re.compile(r"GLOBAL ([\w.]+)")


def load(source: Path | io.BytesIO, name: str, trust_pickle: bool) -> Any:
    """What torch.save wrote, on the CPU. `name` is what errors call it."""
    try:
        if trust_pickle:
            return torch.load(source, map_location="cpu", weights_only=False)
        stand_ins: list[Any] = [(value, full_name) for full_name, value in _STAND_INS.items()]
        with torch.serialization.safe_globals(stand_ins):
            mapped = isinstance(source, Path) and _is_zip(source)
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError:
        raise CheckpointError(f"{name} must be a file, got none.") from None
    except pickle.UnpicklingError as error:
        kind = WantsCode if _WANTED.search(str(error)) else CheckpointError
        raise kind(f"{name}: {_refusal(str(error))}") from None
    except Exception as error:  # a malformed pickle fails in any way
        raise CheckpointError(
            f"{name}: must be a whole file of torch.save, got: {_first_line(error)}."
        ) from None


def load_metadata(path: Path, trust_pickle: bool) -> Any:
    """The file .metadata of a distributed checkpoint."""
    try:
        with path.open("rb") as file:
            unpickler = pickle.Unpickler(file) if trust_pickle else _MetadataUnpickler(file)
            return unpickler.load()
    except FileNotFoundError:
        raise CheckpointError(f"{path} must be a file, got none.") from None
    except Exception as error:  # a malformed pickle fails in any way
        raise CheckpointError(f"{path}: {_refusal(str(error))}") from None


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib":
            return PurePosixPath
        if module.startswith("megatron.core.dist_checkpointing"):
            return Inert
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"Unsupported global: GLOBAL {module}.{name} ")


def storages(path: Path) -> list[torch.Tensor] | None:
    """The bytes of each tensor that torch.save wrote, without loading the pickle.

    None if that cannot be known: files of torch before 1.6 hold everything in their pickle.
    """
    if not _is_zip(path):
        return None
    with zipfile.ZipFile(path) as archive:
        found = [i for i in archive.infolist() if re.fullmatch(r".+/data/\d+", i.filename)]
        if any(i.compress_type != zipfile.ZIP_STORED for i in found):
            raise CheckpointError(f"{path}: records must not be compressed. Save it anew.")
        found.sort(key=lambda i: int(i.filename.rpartition("/")[2]))
        parts = [bytearray(archive.read(i)) for i in found if i.file_size > 0]
    return [torch.frombuffer(part, dtype=torch.uint8) for part in parts]


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _refusal(message: str) -> str:
    found = _WANTED.search(message)
    if found is None:
        return f"must be a file of torch.save, got: {_first_line(message)}"
    return (
        f"the pickle wants {found.group(1)}, which is not loaded because it could run code. If you "
        "trust who wrote the file, give --trust-pickle."
    )


def _first_line(error: object) -> str:
    return (str(error).strip().splitlines() or ["nothing"])[0][:200]
