# SPDX-License-Identifier: Apache-2.0
"""Memory for the copies of one step, which the copies of the next step use again."""

from __future__ import annotations

import mmap

import torch

_BLOCK = 64 << 20  # bytes; a larger tensor has a block of its own
_LEAST = 64 << 10  # a smaller tensor costs less in memory of its own
_ALIGNMENT = 64


class Arena:
    """Copies tensors to the CPU, into blocks of huge pages.

    New memory in pages of 4 KiB would cost more time than the copies themselves.
    """

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._block, self._at = 0, 0  # where the next copy begins

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy that is valid until `clear`."""
        size = tensor.numel() * tensor.element_size()
        if size < _LEAST or tensor.layout != torch.strided or tensor.is_quantized:
            return tensor.to("cpu", copy=True).contiguous()
        with torch._C.DisableTorchFunction():  # bytes are copied, whatever a mode does with dtypes
            place = self._place(size).view(tensor.dtype).view(tensor.shape)
            return place.copy_(tensor)

    def clear(self) -> None:
        """Begins anew; copies that were made are written over by later ones."""
        self._block, self._at = 0, 0

    def _place(self, size: int) -> torch.Tensor:
        while self._block < len(self._blocks):
            block = self._blocks[self._block]
            if self._at + size <= block.numel():
                place = block[self._at : self._at + size]
                self._at += -(-size // _ALIGNMENT) * _ALIGNMENT
                return place
            self._block, self._at = self._block + 1, 0
        self._blocks.append(_new_block(max(size, _BLOCK)))
        return self._place(size)


def _new_block(size: int) -> torch.Tensor:
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
