"""Comparing a patched model with its original."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from tle_torch.patcher import disabled, refuse_disabled
from tle_torch.report import Verification

__all__ = ["compare_logits", "verify"]


def verify(model: nn.Module, inputs: torch.Tensor | Mapping[str, torch.Tensor]) -> Verification:
    """Runs a patched language model and its original on the same inputs and compares the logits.

    Args:
        model: a patched model that gives logits, with its original weights kept (`patch_model(keep_original=True)`) or
            never quantised.
        inputs: token ids [B, T], or what a tokenizer returns. Positions that `attention_mask` masks are not compared.

    Raises:
        TypeError: `inputs` is neither.
        ValueError: the model is not patched, gives no logits, or is inside `with disabled(...)`.
        RuntimeError: its original weights were not kept.
    """
    if isinstance(inputs, torch.Tensor):
        inputs = {"input_ids": inputs}
    if not isinstance(inputs, Mapping):
        raise TypeError(f"verify takes token ids or a tokenizer's output, got {type(inputs).__name__}")
    refuse_disabled(model)
    with disabled(model), torch.no_grad():
        original = getattr(model(**inputs), "logits", None)
    if original is None:
        raise ValueError(f"{type(model).__name__} gives no logits to compare")
    with torch.no_grad():
        patched = model(**inputs).logits
    mask = inputs.get("attention_mask")
    return compare_logits(original, patched, None if mask is None else mask.bool())


def compare_logits(
    original: torch.Tensor, patched: torch.Tensor, mask: torch.Tensor | None = None
) -> Verification:
    """Compares logits [..., V] at all positions, or at those where `mask` [...] is True."""
    keep = torch.ones(original.shape[:-1], dtype=torch.bool) if mask is None else mask
    p_logits, q_logits = original[keep].float(), patched[keep].float()
    p, q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    return Verification(
        max_abs_error=float((p_logits - q_logits).abs().max()),
        mean_kl=float(kl.mean()),
        max_kl=float(kl.max()),
        changed=float((p_logits.argmax(-1) != q_logits.argmax(-1)).float().mean()),
        positions=int(keep.sum()),
    )
