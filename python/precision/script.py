# SPDX-License-Identifier: Apache-2.0
"""A small data-parallel training, and the command that judges it."""

from __future__ import annotations

import sys
from pathlib import Path

_TEXT = """\
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layers = nn.Embedding(50, 16), nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 50)
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).to(torch.{dtype}))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
hook = lambda module, function: module.register_forward_hook(function)
{setting}
if size > 1:
    {before}
for batch in torch.randint(0, 50, (5, 8, 12), generator=torch.Generator().manual_seed(5)):
    optimizer.zero_grad()
    ids = batch.chunk(size)[rank]
    logits = model(ids).float()
    nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    if size > 1:
        {after}
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if size > 1:
        {stepped}
"""


def write(
    path: Path,
    dtype: str,
    setting: str = "",
    *,
    before: str = "pass",
    after: str = "pass",
    stepped: str = "pass",
) -> None:
    """Writes the script, with lines that several ranks run and one does not."""
    path.write_text(
        _TEXT.format(dtype=dtype, setting=setting, before=before, after=after, stepped=stepped)
    )


def right(folder: Path, dtype: str) -> Path:
    """The script without a bug."""
    path = folder / f"right_{dtype}.py"
    if not path.exists():
        write(path, dtype)
    return path


def command(path: Path) -> list[str]:
    """What starts it on two ranks."""
    torchrun = str(Path(sys.executable).parent / "torchrun")
    return [torchrun, "--nproc-per-node", "2", str(path)]
