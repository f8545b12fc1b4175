# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own: DDP, FSDP2, HSDP."""
from ..spec import Spec
PRELOAD=("matrix.models",)
ENVIRONMENT={}
def specs():
    return iter(())
