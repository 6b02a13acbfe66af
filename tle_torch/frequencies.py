"""Rotary frequencies that are the same bits on every machine.

transformers computes them with torch's power function, whose last bit depends on the vector unit that torch finds: base
1e6 gives other frequencies with AVX2 (or NEON) than on an x86-64 CPU without. Everything else in the formulas
(division, products, `where`) is exact IEEE arithmetic. So the model's own formula is run once more with powers in
double precision, rounded to fp32: the nearest value, whoever computes it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tle_torch.few_operators import near

__all__ = ["ExactPowers", "exact_frequencies"]

_POWERS = frozenset({"pow", "__pow__", "__rpow__"})
# How far two evaluations of one formula may lie apart: some units in the last place of fp32, from the power's own
# error.
_TOLERANCE = 16 * torch.finfo(torch.float32).eps


class ExactPowers(TorchFunctionMode):
    """While it is active, powers of fp32 tensors are computed in double precision and rounded once."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _POWERS:
            wide = [a.double() if isinstance(a, torch.Tensor) and a.dtype == torch.float32 else a for a in args]
            result = func(*wide, **kwargs)
            # A tensor that is fp64 by itself stays so.
            narrow = any(a is not w for a, w in zip(args, wide)) and result.dtype == torch.float64
            return result.float() if narrow else result
        return func(*args, **kwargs)


def exact_frequencies(module: nn.Module) -> torch.Tensor | None:
    """The frequencies of a rotary embedding module, by its own formula with exact powers.

    Args:
        module: has a `config`, the argument that its class is made from, and a buffer `inv_freq`.

    Returns:
        fp32 [R / 2]; None if the module's frequencies are not what its config says (somebody set others, or its class
        is made in another way). They are data then, like a weight.
    """
    own = module._buffers["inv_freq"]
    start = module._buffers.get("original_inv_freq")
    own = own if start is None else start  # what a dynamic type starts from
    try:
        with ExactPowers():
            exact = type(module)(config=module.config)._buffers["inv_freq"]
    except Exception:
        return None
    # A module that was cast holds rounded frequencies: the neighbouring value is as good.
    tolerance = _TOLERANCE + (torch.finfo(own.dtype).eps if own.dtype != torch.float32 else 0.0)
    if exact.shape != own.shape:
        return None
    return exact if near(exact.to(own.dtype).float(), own.float(), rtol=tolerance) else None
