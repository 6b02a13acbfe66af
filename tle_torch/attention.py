"""Attention of the module-by-module path: transformers' `AttentionInterface` and `AttentionMaskInterface`, name "tle".

transformers hands an attention function the queries, the keys and values of its cache (not repeated per query head) and
whatever the mask function of the same name made. A mask of [B, 1, Q, S] booleans is what that contract asks for, but
nearly every one says only "causal, the last `window` keys, the first `starts[b]` keys of row b are padding". So the
mask function recognises those and returns a `LazyTensor` that carries the three numbers: our attention function reads
them, anybody else sees the booleans. Then a mask of Q x S is never made, and attention cuts the keys into the same
blocks as the whole-step path does, which is what makes both the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_tracing

from tle_torch.autocast import alike
from tle_torch.cache import Int8States
from tle_torch.lazy import LazyTensor

__all__ = ["CausalMask", "NAME", "left_padding"]

# The value of config._attn_implementation on a patched model.
NAME = "tle"


class CausalMask(LazyTensor):
    """The booleans [B, 1, Q, S] of a causal mask, as numbers: query i of row b may attend to the key slots
    `starts[b] ..< used` that are at most `used - Q + i` and more than `used - Q + i - window`.

    Attributes:
        used: key slots that hold tokens; a static cache has more slots than that.
        window: how many keys a query sees at most, itself included; 0 for no limit.
        starts: int64 [B], the first real key of each row (its left padding); None for none.
    """

    @staticmethod
    def __new__(cls, shape, build: Callable[[], torch.Tensor], used: int, window: int, starts: torch.Tensor | None):
        self = LazyTensor.__new__(
            cls, shape, torch.bool, build, "a mask that transformers made may be read, not changed in place"
        )
        self.used, self.window, self.starts = used, window, starts
        return self


def left_padding(attention_mask: torch.Tensor | None, length: int, offset: int = 0):
    """How far each row of a 2-D padding mask is padded on the left.

    Args:
        attention_mask: [B, L], non-zero for tokens that count; None for all.
        length: how many tokens there are; the mask must cover them.
        offset: tokens that the cache no longer holds (a sliding window's past).

    Returns:
        None: no padding. int64 [B]: the first real token of each row, counted from `offset`. False: the mask is of
        another kind (right padding, holes, a row without any token, or not as long as the tokens).
    """
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2 or attention_mask.shape[1] != length:
        return False
    real = attention_mask if attention_mask.dtype == torch.bool else attention_mask != 0
    counts = real.sum(-1)
    if int(counts.min()) == length:
        return None
    starts = length - counts
    # A row is padded on the left only if nothing before its start counts: then its first real token is at the start.
    if not bool((real.int().argmax(-1) == starts).all()) or int(counts.min()) == 0:
        return False
    return (starts - offset).clamp_(min=0) if offset else starts


def _window_of(mask_function: Callable, local_size: int | None) -> int | None:
    """The window of transformers' causal (0) or sliding causal mask function, None for any other function."""
    if mask_function is causal_mask_function:
        return 0
    # sliding_window_causal_mask_function(w) is and_masks(sliding_window_overlay(w), causal_mask_function).
    cells = getattr(mask_function, "__closure__", None)
    parts = cells[0].cell_contents if cells and len(cells) == 1 else None
    if (
        isinstance(parts, tuple)
        and len(parts) == 2
        and getattr(parts[0], "__qualname__", "") == "sliding_window_overlay.<locals>.inner_mask"
        and parts[1] is causal_mask_function
    ):
        window = parts[0].__closure__[0].cell_contents
        return window if window == local_size else None
    return None


def tle_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    **kwargs,
) -> torch.Tensor | None:
    """The mask function of "tle" (see transformers.masking_utils for the arguments).

    Returns:
        None: plain causal, no padding, no window, and the last query sees the last key slot. A `CausalMask`: causal
        with padding, window or unused key slots. Otherwise the booleans [B, 1, Q, S] of `sdpa_mask`.
    """
    window = None if use_vmap or torch.compiler.is_compiling() else _window_of(mask_function, local_size)

    def build() -> torch.Tensor | None:
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            # sdpa's shortcut is a causal mask aligned to the first key; ours is aligned to the last.
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            use_vmap=use_vmap,
            **kwargs,
        )

    if window is None or (isinstance(q_offset, torch.Tensor) and is_tracing(q_offset)):
        return build()
    offset = int(q_offset)
    used = offset + q_length - kv_offset
    if attention_mask is not None and attention_mask.shape[-1] > used + kv_offset:
        # Generation with a static cache pads the 2-D mask to the cache's length; nothing after the newest token counts.
        attention_mask = attention_mask[:, : used + kv_offset]
    starts = left_padding(attention_mask, used + kv_offset, kv_offset)
    if starts is False or not 0 < used <= kv_length:
        return build()
    if window >= used:
        window = 0
    if starts is None and window == 0 and used == kv_length and allow_is_causal_skip:
        return None
    return CausalMask((batch_size, 1, q_length, kv_length), build, used, window, starts)


def tle_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cache=None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention function of "tle".

    Args:
        query: [B, Hq, Q, D].
        key, value: [B, Hkv, S, D] and [B, Hkv, S, Dv], any strides with a dense last dimension; or the `Int8States` of
            an int8 cache.
        attention_mask: what `tle_mask` made, or a caller's own boolean or additive mask [B or 1, Hq or 1, Q, S].
        scaling: multiplies the scores; None for 1 / sqrt(D).
        softcap, s_aux: cap of the scores and attention sinks [Hq], None for none.

    Returns:
        [B, Q, Hq, Dv], and the attention probabilities [B, Hq, Q, S] if the caller asked for them
        (`output_attentions`), else None. The probabilities are computed beside the output, in fp32, for reading.

    Raises:
        ValueError: dropout, a position bias or a paged cache, which have no kernel here.
    """
    if dropout:
        raise ValueError("tle attention has no dropout: call model.eval() or set attention_dropout to 0")
    if position_bias is not None or cache is not None:
        raise ValueError(
            f"tle attention takes no {'position bias' if position_bias is not None else 'paged cache'}: use "
            f"model.set_attn_implementation('sdpa')"
        )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    mask, window, starts, keys = attention_mask, 0, None, key
    if isinstance(key, Int8States):
        key, value = key.slots, value.slots
    else:
        query, key, value = alike(query, key, value)
    if isinstance(mask, CausalMask):
        if mask.used < key.shape[2]:
            key, value = key.narrow(2, 0, mask.used), value.narrow(2, 0, mask.used)
        mask, window, starts, causal = None, mask.window, mask.starts, True
    elif mask is not None:
        # A mask that says everything, causality included. A static cache's may be longer than the keys.
        mask, causal = mask[..., : key.shape[2]], False
    output = torch.ops.tle.attention(
        query, key, value, scaling, mask, causal, window, softcap or 0.0, s_aux, starts
    ).transpose(1, 2)
    weights = None
    if kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        keys = keys.narrow(2, 0, key.shape[2])
        weights = _probabilities(query, keys, scaling, attention_mask, causal, softcap, s_aux)
    return output, weights


def _probabilities(query, key, scaling, attention_mask, causal, softcap, sinks) -> torch.Tensor:
    """softmax(q kᵀ) [B, Hq, Q, S] in the query's dtype, as transformers' eager attention returns it."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.matmul(query.float(), key.float().transpose(2, 3)) * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    queries, keys = scores.shape[-2:]
    if attention_mask is None:
        allowed = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries) if causal else None
    else:
        allowed = attention_mask[..., :keys]
    if allowed is not None and allowed.dtype == torch.bool:
        scores = scores.masked_fill(~allowed, float("-inf"))
    elif allowed is not None:
        scores = scores + allowed
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    # A row that may attend to nothing (padding) has probabilities 0, as the kernel gives it.
    return torch.softmax(scores, dim=-1).nan_to_num_(0.0)[..., :keys].to(query.dtype)


AttentionInterface.register(NAME, tle_attention)
AttentionMaskInterface.register(NAME, tle_mask)
