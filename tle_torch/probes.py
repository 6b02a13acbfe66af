"""Numeric proof that a module computes what its structure suggests.

Each probe runs the module's own forward on a shadow of it (same code and settings, small random weights instead of its
own) and compares with the formula that TLE's kernel implements. Class names decide nothing here: a model file may call
anything "RMSNorm".
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from tle_torch.few_operators import SummedProducts, near
from tle_torch.layers import PatchedRotary, patched_class

__all__ = ["epsilon_name", "looks_like_gated_mlp", "looks_like_norm", "looks_like_rotary", "norm_kind", "probe_mlp",
           "probe_rotary"]

_EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")


def shadow(module: nn.Module) -> nn.Module:
    """A shallow copy whose parameters, buffers and children can be replaced without touching the original."""
    twin = copy.copy(module)
    for name in ("_parameters", "_buffers", "_modules"):
        twin.__dict__[name] = dict(twin.__dict__[name])
    return twin


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(20240229)


# ---- RMSNorm ----


def epsilon_name(module: nn.Module) -> str | None:
    """The attribute that holds a norm's epsilon, or None."""
    return next((name for name in _EPSILONS if isinstance(getattr(module, name, None), float)), None)


def looks_like_norm(module: nn.Module) -> bool:
    """Whether a module has the structure of an RMSNorm: one 1-D weight, an epsilon, and nothing else."""
    weight = module._parameters.get("weight")
    return (
        weight is not None
        and weight.dim() == 1
        and not module._modules
        and sum(p is not None for p in module._parameters.values()) == 1
        and not any(b is not None for b in module._buffers.values())
        and epsilon_name(module) is not None
    )


@torch.inference_mode()
def norm_kind(module: nn.Module) -> str | None:
    """Which RMSNorm a module computes: "llama" (x^ rounded to x's dtype, then times w), "gemma" (times 1 + w in fp32,
    rounded once), "fp32" (times w in fp32, rounded once), or None: something else."""
    size = module._parameters["weight"].shape[0]
    eps = getattr(module, epsilon_name(module))
    generator = _generator()
    # Rows around 1, tiny ones, where epsilon counts, and large ones.
    sizes = torch.tensor([1.0, 1.0, 3e-3, 1e-3, 40.0, 300.0], dtype=torch.float32)
    x = torch.randn(6, size, generator=generator, dtype=torch.float32) * sizes.view(-1, 1)
    w = torch.randn(size, generator=generator, dtype=torch.float32)
    outputs = {}
    twin = shadow(module)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            twin._parameters["weight"] = nn.Parameter(w.to(dtype), requires_grad=False)
            outputs[dtype] = twin.forward(x.to(dtype))
    except Exception:
        return None  # a forward with other arguments, or of another shape: no RMSNorm
    for kind in ("llama", "gemma", "fp32"):
        exact, rounded = outputs[torch.float32], outputs[torch.bfloat16]
        wanted = _norm(x, w, eps, kind)
        wanted_rounded = _norm(x.bfloat16(), w.bfloat16(), eps, kind)
        if exact.shape != x.shape or exact.dtype != torch.float32 or rounded.dtype != torch.bfloat16:
            return None
        if not near(exact, wanted, rtol=1e-5, atol=1e-6):
            continue
        # The sum's order may move a value over a rounding edge; the wrong kind differs in a quarter of the elements.
        differing = (rounded != wanted_rounded).float().mean()
        if differing <= 0.01:
            return kind
    return None


def _norm(x: torch.Tensor, w: torch.Tensor, eps: float, kind: str) -> torch.Tensor:
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    if kind == "llama":
        return w * normed.to(x.dtype)
    return (normed * (1.0 + w.float() if kind == "gemma" else w.float())).to(x.dtype)


# ---- gated MLP ----


def looks_like_gated_mlp(module: nn.Module, gate: str, up: str, down: str, activation: str) -> bool:
    """Whether a module has exactly the children of a gated MLP, and no weights of its own."""
    names = set(module._modules)
    return {gate, up, down} <= names <= {gate, up, down, activation} and not module._parameters and not module._buffers


class _Linear(nn.Linear):
    """A Linear of given values: without the usual initialisation, which would draw from the user's random numbers."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor):
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(bias, requires_grad=False)


@torch.inference_mode()
def probe_mlp(module: nn.Module, gate: str, up: str, down: str) -> bool:
    """Whether a gated MLP's forward is down(silu(gate(x)) * up(x))."""
    generator = _generator()
    twin = shadow(module)
    small = {}
    for name, (rows, columns) in {gate: (24, 16), up: (24, 16), down: (16, 24)}.items():
        weight = torch.randn(rows, columns, generator=generator, dtype=torch.float32)
        small[name] = _Linear(weight, torch.randn(rows, generator=generator, dtype=torch.float32))
    twin._modules.update(small)
    x = torch.randn(2, 5, 16, generator=generator, dtype=torch.float32)
    with SummedProducts():
        wanted = small[down](nn.functional.silu(small[gate](x)) * small[up](x))
        try:
            got = twin.forward(x)
        except Exception:
            return False  # a forward with other arguments, or one that reads sizes of its own
    return isinstance(got, torch.Tensor) and near(got, wanted, rtol=1e-5, atol=1e-4)


# ---- rotary embedding ----


def looks_like_rotary(module: nn.Module) -> bool:
    """Whether a module has the structure of a rotary embedding: one 1-D `inv_freq`, a scaling, a type, no weights."""
    inv_freq = module._buffers.get("inv_freq")
    return (
        inv_freq is not None
        and inv_freq.dim() == 1
        and not module._parameters
        and not module._modules
        and isinstance(getattr(module, "attention_scaling", None), (int, float))
        and isinstance(getattr(module, "rope_type", None), str)
    )


@torch.inference_mode()
def probe_rotary(module: nn.Module) -> bool:
    """Whether the patched rotary module gives this module's cos and sin: every frequency twice, fp32 angles."""
    limit = min(2048, int(getattr(module, "original_max_seq_len", 2048)))
    positions = torch.tensor([[0, 1, 2, 3, limit // 3, limit - 1]])
    x = torch.zeros(1, dtype=torch.float32)
    original, patched = shadow(module), shadow(module)
    for twin in (original, patched):
        # Dynamic scaling writes into this buffer.
        twin._buffers = {k: None if b is None else b.clone() for k, b in twin._buffers.items()}
    patched.__class__ = patched_class(PatchedRotary, type(module))
    try:
        wanted = original.forward(x, positions)
        got = patched.forward(x, positions)
    except Exception:
        return False  # a forward with other arguments
    return (
        isinstance(wanted, tuple)
        and len(wanted) == 2
        and all(near(g, w, rtol=1e-5, atol=2e-6) for g, w in zip(got, wanted))
    )
