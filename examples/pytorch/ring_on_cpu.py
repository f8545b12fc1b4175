# SPDX-License-Identifier: Apache-2.0
"""Lets torch 2.11's context_parallel run on a CPU: it knows no attention kernel of a CPU."""

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.experimental._context_parallel import _attention as context

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
NAMES = {
    KERNEL: ("query", "key", "value", "dropout_p", "is_causal"),
    BACKWARD: "grad_out query key value out logsumexp dropout_p is_causal".split(),
}


def ring(op, args, kwargs):
    """Torch's own ring, of which only the kernel is another; all tensors are cut along dim 2."""
    given = dict(zip(NAMES[op], args, strict=False)) | kwargs
    assert given.pop("attn_mask", None) is None, "a mask must be left to is_causal"
    mesh, placements = given["query"].device_mesh, given["query"].placements
    given = {k: v._local_tensor if isinstance(v, DTensor) else v for k, v in given.items()}
    if op is KERNEL:
        parts = context._templated_ring_attention(mesh.get_group(), 2, op, **given)
    else:
        parts = context._templated_ring_attention_backward(
            mesh.get_group(), 2, op, grad_out_name="grad_out", **given
        )
    specs = []
    for part in parts:
        shape = torch.Size([*part.shape[:2], part.shape[2] * mesh.size(), *part.shape[3:]])
        whole = TensorMeta(shape, torch.empty(shape, device="meta").stride(), part.dtype)
        specs.append(DTensorSpec(mesh, placements, tensor_meta=whole))
    return DTensor._op_dispatcher.wrap(parts, specs)


context.custom_ops |= {KERNEL: ring, BACKWARD: ring}
