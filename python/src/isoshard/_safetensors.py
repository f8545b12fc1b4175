# SPDX-License-Identifier: Apache-2.0
"""Reads and writes safetensors files, so that nothing but torch is needed."""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .errors import BundleError, CheckpointError, RecordError

#: torch dtype -> (name in a bundle, name in a safetensors header)
DTYPES: dict[torch.dtype, tuple[str, str]] = {
    torch.float64: ("fp64", "F64"),
    torch.float32: ("fp32", "F32"),
    torch.bfloat16: ("bf16", "BF16"),
    torch.float16: ("fp16", "F16"),
    torch.int64: ("int64", "I64"),
    torch.int32: ("int32", "I32"),
    torch.int16: ("int16", "I16"),
    torch.int8: ("int8", "I8"),
    torch.uint8: ("uint8", "U8"),
    torch.bool: ("bool", "BOOL"),
}
OF_HEADER = {header: dtype for dtype, (_, header) in DTYPES.items()}

#: Name in a bundle -> torch dtype
OF_NAME = {name: OF_HEADER[header] for name, header in DTYPES.values()}


def dtype_name(dtype: torch.dtype, what: str) -> str:
    """The bundle's name of a dtype, such as fp32."""
    if dtype not in DTYPES:
        known = ", ".join(sorted(str(d) for d in DTYPES))
        raise RecordError(
            f"The dtype of {what} must be one of {known}, got {dtype}. "
            "Convert it with transform=, or name it in not_recorded=."
        )
    return DTYPES[dtype][0]


def write_safetensors(
    path: Path,
    tensors: Sequence[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
    *,
    is_new: bool = False,
) -> None:
    """Writes contiguous CPU tensors under their names, in this order.

    `is_new`: a file that is there already is an error. (ext4 writes a file that replaces another
    one to the disk when it is closed, and the program waits for that.)
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, tensor in tensors:
        header[name] = {
            "dtype": DTYPES[tensor.dtype][1],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb" if is_new else "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in tensors:
            whole = tensor.detach().contiguous()
            if whole.nbytes:
                file.write((ctypes.c_char * whole.nbytes).from_address(whole.data_ptr()))


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements of a CPU tensor in row-major order, without numpy, which may be absent."""
    tensor = tensor.detach().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a file by tensor name, and where its data begin."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > path.stat().st_size:
            raise BundleError(
                f"The header of {path} must fit into the file, got {size} bytes. Record the "
                "bundle anew."
            )
        header = json.loads(file.read(size))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, 8 + size


def read_safetensors(path: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a file whose names have the prefix, on the CPU."""
    header, begin_of_data = read_header(path)
    if prefix:
        return _read_one_by_one(path, header, begin_of_data, prefix)
    data = bytearray(path.read_bytes())
    tensors = {}
    for name, entry in header.items():
        dtype, shape = OF_HEADER[entry["dtype"]], entry["shape"]
        begin, _ = entry["data_offsets"]
        count = math.prod(shape)
        if count == 0:
            tensors[name] = torch.empty(shape, dtype=dtype)
            continue
        at = begin_of_data + begin
        tensors[name] = torch.frombuffer(data, dtype=dtype, count=count, offset=at).reshape(shape)
    return tensors


def open_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a file that anybody may have written, as they lie in it, and its metadata.

    Raises CheckpointError if the header does not describe the bytes behind it, each of them once.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length + 8 > size or length > _LONGEST_HEADER:
            raise CheckpointError(
                f"{path}: its header must end in the file, got {length} bytes of header in a file "
                f"of {size} bytes."
            )
        try:
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__", {})
            places = {name: _place_in(entry) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{path}: its header must be that of a safetensors file, got "
                f"{type(error).__name__}: {error}."
            ) from None
    data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)[8 + length :]
    tensors, end = {}, 0
    for name, (dtype, shape, begin, stop) in sorted(places.items(), key=lambda p: p[1][2:]):
        if begin != end or stop - begin != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(
                f"{path}: {name} must be {math.prod(shape)} elements of {dtype} that begin at "
                f"byte {end} of the data, got the bytes from {begin} to {stop}."
            )
        end = stop
        part = data[begin:stop]
        if part.storage_offset() % dtype.itemsize != 0:
            part = part.clone()
        tensors[name] = part.view(dtype).reshape(shape)
    if end != data.numel():
        raise CheckpointError(
            f"{path}: its tensors must fill {data.numel()} bytes of data, got {end}."
        )
    return tensors, metadata


_LONGEST_HEADER = 100_000_000


def _place_in(entry: Mapping[str, Any]) -> tuple[torch.dtype, list[int], int, int]:
    """dtype, shape, begin and end of a tensor; raises ValueError if they make no sense."""
    dtype, shape, (begin, end) = OF_HEADER[entry["dtype"]], entry["shape"], entry["data_offsets"]
    numbers = [*shape, begin, end]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"a shape and offsets of whole numbers are needed, got {numbers}")
    return dtype, shape, begin, end


def _read_one_by_one(
    path: Path, header: Mapping[str, Any], begin_of_data: int, prefix: str
) -> dict[str, torch.Tensor]:
    tensors = {}
    with path.open("rb") as file:
        for name, entry in header.items():
            if not name.startswith(prefix):
                continue
            begin, end = entry["data_offsets"]
            file.seek(begin_of_data + begin)
            data = bytearray(file.read(end - begin))
            dtype = OF_HEADER[entry["dtype"]]
            flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            tensors[name] = flat.reshape(entry["shape"])
    return tensors
