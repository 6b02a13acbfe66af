"""Probes' arithmetic out of few of torch's operators.

An operator that a process runs for the first time brings 0.1 to 0.6 MB of torch's code into its memory. Of what probes
would naturally call, `torch.allclose` brings 1.2 MB, a product of fp32 matrices 1.5 MB (MKL), and one of bf16 matrices
5 MB (oneDNN, which also writes code of its own). A model that is patched throughout calls none of them again.
"""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["SummedProducts", "near"]

_MATMUL = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_PRODUCTS = 1 << 20  # 4 MB of them


def near(got: torch.Tensor, wanted: torch.Tensor, *, rtol: float = 0.0, atol: float = 0.0) -> bool:
    """Whether two tensors have one shape and dtype, and |got - wanted| <= atol + rtol |wanted| in every element. NaN is
    near to nothing."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    excess = (got - wanted).abs() - rtol * wanted.abs()
    return excess.numel() == 0 or excess.max().item() <= atol


class SummedProducts(TorchFunctionMode):
    """While it is active, `matmul` and `linear` of small operands multiply element by element and sum in fp32. What
    torch would refuse, it refuses."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _MATMUL and not kwargs and _is_small(*args):
            return _product(*args)
        if func is torch.nn.functional.linear and not kwargs and _is_small(args[0], args[1].mT):
            x, weight, *bias = args
            product = _product(x, weight.mT)
            return product if not bias or bias[0] is None else product + bias[0]
        return func(*args, **kwargs)


def _is_small(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether `_product` takes two (batches of) matrices, and all their products may be in memory at once."""
    if a.dim() < 2 or b.dim() < 2 or a.shape[-1] != b.shape[-2] or a.dtype != b.dtype or a.dtype not in _DTYPES:
        return False
    return max(a.numel() * b.shape[-1], b.numel() * a.shape[-2]) <= _MOST_PRODUCTS


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[..., M, K] times [..., K, N], rounded once to a's dtype."""
    return (a.float().unsqueeze(-1) * b.float().unsqueeze(-3)).sum(-2).to(a.dtype)
