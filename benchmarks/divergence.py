"""How far a model's next-token distributions are from a reference's. Needs torch alone, for peers' environments too."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass
class Cost:
    """Of one variant, over all positions: Kullback-Leibler divergences KL(reference || variant) in nats, the standard
    error of their mean (as if positions were independent), and the share of positions whose most likely token is
    another."""

    variant: str
    mean_kl: float
    error_of_mean: float
    p99_kl: float
    changed: float
    kl: torch.Tensor  # [positions]

    def figures(self) -> dict[str, str | float]:
        """What is no tensor."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "kl"}


def windows_of(text: str, tokenizer, tokens: int, length: int) -> torch.Tensor:
    """The text's first `tokens` tokens in windows [count, length]. A ValueError if the text has fewer."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
    count = tokens // length
    if len(ids) < count * length:
        raise ValueError(f"the text has {len(ids)} tokens, {count * length} are needed")
    return ids[: count * length].view(count, length)


@torch.no_grad()
def logits(model, windows: torch.Tensor) -> torch.Tensor:
    """[positions, vocabulary] in fp32, each window read from its beginning."""
    return torch.cat([model(window.unsqueeze(0), use_cache=True).logits[0].float() for window in windows])


def divergences(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(reference || other) in nats at each position, of logits [positions, vocabulary] in fp32."""
    kl = []
    for a, b in zip(reference.split(256), other.split(256)):
        p, q = a.log_softmax(-1), b.log_softmax(-1)
        kl.append((p.exp() * (p - q)).sum(-1))
    return torch.cat(kl)


def mean_and_error(values: torch.Tensor) -> tuple[float, float]:
    """Mean and its standard error."""
    return float(values.mean()), float(values.std() / len(values) ** 0.5)


def cost(variant: str, reference: torch.Tensor, other: torch.Tensor) -> Cost:
    """Of logits against the reference's, both [positions, vocabulary] in fp32."""
    kl = divergences(reference, other)
    changed = (reference.argmax(-1) != other.argmax(-1)).float().mean()
    return Cost(variant, *mean_and_error(kl), float(kl.quantile(0.99)), float(changed), kl)
