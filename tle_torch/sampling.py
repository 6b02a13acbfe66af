"""Choosing a token from scores as transformers and torch do, in less time.

For a vocabulary of 150,000 torch.multinomial takes 3 ms, of which most is drawing an exponential for every token, and
transformers' TopPLogitsWarper 10 ms, of which most is sorting: together more than a token of a small model. The
operators of TLE that are used here have the same results, bit for bit and with the same state of the random generator
afterwards. That depends on how torch draws and sorts and on what transformers' classes compute; so before one is used
for the first time, it is compared with their own code on small inputs, and where another version computes something
else, its own code it stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

__all__ = ["draw", "faster"]

Process = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def draw(probabilities: torch.Tensor) -> torch.Tensor:
    """A token for each row of probabilities [B, V]: `torch.multinomial(probabilities, num_samples=1)`, int64 [B, 1]."""
    if _is_plain(probabilities) and _draws_alike(torch.multinomial):
        return torch.ops.tle.multinomial(probabilities)
    return torch.multinomial(probabilities, num_samples=1)


def faster(processor: LogitsProcessor) -> Process | None:
    """A function of (sequences, scores) that gives what `processor` gives, or None if there is none. The processor's
    settings are read at each call."""
    formula = _FORMULAS.get(type(processor))
    if formula is None or not _computes_alike(type(processor), type(processor).__call__):
        return None

    def process(sequences: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if _is_plain(scores) and type(processor.filter_value) in (int, float):
            processed = formula(processor, scores)
            if processed is not None:
                return processed
        return processor(sequences, scores)

    return process


def _is_plain(x: torch.Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.dim() == 2 and x.shape[1] > 0


# ---- the processors' formulas: scores [B, V], or None for settings that they do not cover ----


def _top_k(processor: TopKLogitsWarper, scores: torch.Tensor) -> torch.Tensor | None:
    if type(processor.top_k) is not int or processor.top_k < 1:
        return None
    return torch.ops.tle.top_k_logits(scores, processor.top_k, processor.filter_value)


def _top_p(processor: TopPLogitsWarper, scores: torch.Tensor) -> torch.Tensor | None:
    top_p, at_least = processor.top_p, processor.min_tokens_to_keep
    if type(top_p) is not float or not 0 <= top_p <= 1 or type(at_least) is not int or at_least < 1:
        return None
    return torch.ops.tle.top_p_logits(scores, top_p, processor.filter_value, at_least)


def _min_p(processor: MinPLogitsWarper, scores: torch.Tensor) -> torch.Tensor | None:
    """The most likely token, which transformers looks up and keeps, is never below the bar."""
    if not 0 <= processor.min_p <= 1 or processor.min_tokens_to_keep != 1:
        return None
    probabilities = torch.softmax(scores, dim=-1)
    bar = processor.min_p * probabilities.amax(dim=-1, keepdim=True)
    return scores.masked_fill(probabilities < bar, processor.filter_value)


_FORMULAS = {TopKLogitsWarper: _top_k, TopPLogitsWarper: _top_p, MinPLogitsWarper: _min_p}
# Their settings in the proof.
_SETTINGS = {
    TopKLogitsWarper: [{"top_k": 1}, {"top_k": 40}, {"top_k": 2000}, {"top_k": 7, "filter_value": -9.0}],
    TopPLogitsWarper: [
        {"top_p": 0.0},
        {"top_p": 0.35},
        {"top_p": 0.9},
        {"top_p": 0.99, "filter_value": -9.0},
        {"top_p": 0.2, "min_tokens_to_keep": 300},
    ],
    MinPLogitsWarper: [{"min_p": 0.0}, {"min_p": 0.1}, {"min_p": 1.0, "filter_value": -9.0}],
}


# ---- proofs, once per process; of the user's random numbers they take none ----


@functools.cache
@torch.no_grad()
def _computes_alike(cls: type[LogitsProcessor], call: Callable) -> bool:
    """Whether a class, whose `__call__` is `call`, computes our formula."""
    i = torch.arange(700, dtype=torch.int64, device="cpu")
    # Many equal scores, of which a sort that is not std::sort would leave others at an edge; few possible tokens; bits.
    tied, few, fine = (i * 389 % 83).float() / 16, (i * 389 % 83).float() / 16, (i * 389 % 701).float().sqrt() - 20
    few[i % 29 != 0] = -torch.inf
    scores = torch.stack([tied, few, fine])
    try:
        for settings in _SETTINGS[cls]:
            processor = cls(**settings)
            wanted, got = processor(i.unsqueeze(0), scores), _FORMULAS[cls](processor, scores)
            if got is None or wanted.dtype != got.dtype or not torch.equal(wanted, got):
                return False
    except Exception:
        return False  # other arguments, or other settings
    return True


@functools.cache
@torch.no_grad()
def _draws_alike(multinomial: Callable) -> bool:
    """Whether torch draws as `tle.multinomial` does, here and now: another build may use MKL's random numbers."""
    i = torch.arange(900, dtype=torch.float32, device="cpu")
    probabilities = torch.stack([torch.where(i % 7 < 3, 1 / (1 + i), 0.0), (i + 1) / 1e5])
    theirs, ours = (torch.Generator(device="cpu").manual_seed(20240229) for _ in range(2))
    try:
        for _ in range(2):
            wanted = multinomial(probabilities, num_samples=1, generator=theirs)
            got = torch.ops.tle.multinomial(probabilities, generator=ours)
            if not torch.equal(wanted, got) or not torch.equal(theirs.get_state(), ours.get_state()):
                return False
            for generator in (theirs, ours):
                torch.empty(3, dtype=torch.float32, device="cpu").uniform_(generator=generator)
    except Exception:
        return False  # other arguments
    return True
