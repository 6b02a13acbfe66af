"""torch.autocast around a patched model.

What is patched computes in its own dtype, whatever autocast says. Modules that were left alone are torch's, and
autocast casts their inputs: where one of each feeds the same operator, their dtypes differ.
"""

from __future__ import annotations

import functools

import torch

__all__ = ["alike"]


def alike(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in their widest dtype under autocast; otherwise as they are, since dtypes that differ are then a
    mistake, which the operator reports."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1 and torch.is_autocast_enabled("cpu"):
        widest = functools.reduce(torch.promote_types, dtypes)
        tensors = tuple(tensor.to(widest) for tensor in tensors)
    return tensors
