"""Model families whose decoder is known well enough to run a whole step in one call.

A family is a declaration: which transformers classes it is made of and what their parts are called. It says nothing
about numbers: `patch_model` proves every part by a numeric probe, and the whole decoder against its own
module-by-module run, before it is used. A module of this package that defines `FAMILY` (or `FAMILIES`) is found by
itself, so that a new family is one new file.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache

import torch

__all__ = ["Family", "all_families", "family_of"]


@dataclass(frozen=True)
class Family:
    """A pre-norm decoder: embedding, layers of (norm, attention, add, norm, MLP, add), final norm.

    Names are attribute names; `module` is the Python module that defines the classes. A class counts only if it is that
    very class, or a subclass that leaves its `forward` alone.
    """

    name: str
    module: str
    model: str
    layer: str
    attention: str
    mlp: str

    embedding: str = "embed_tokens"
    layers: str = "layers"
    final_norm: str = "norm"
    rotary: str = "rotary_emb"

    input_norm: str = "input_layernorm"
    self_attention: str = "self_attn"
    post_norm: str = "post_attention_layernorm"
    feed_forward: str = "mlp"

    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    # Norms over each head's queries and keys; None where the family has none.
    q_norm: str | None = None
    k_norm: str | None = None

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    activation: str = "act_fn"

    # Attribute of the attention module: whether it rotates queries and keys. None: every layer does.
    rotates: str | None = None
    # Which layers see only the last config.sliding_window tokens, if the config has that: "none", "all", or "by type",
    # those that config.layer_types calls "sliding_attention".
    windows: str = "none"

    def window_of(self, attention: torch.nn.Module) -> int:
        """The sliding window of an attention module, 0 for none."""
        config = attention.config
        if self.windows == "none" or config.sliding_window is None:
            return 0
        if self.windows == "by type" and config.layer_types[attention.layer_idx] != "sliding_attention":
            return 0
        return int(config.sliding_window)

    def rotates_in(self, attention: torch.nn.Module) -> bool:
        """Whether an attention module applies the rotary embedding."""
        return self.rotates is None or bool(getattr(attention, self.rotates))

    def is_made_of(self, module: torch.nn.Module, part: str) -> bool:
        """Whether `module` is this family's class for `part` ("model", "layer", "attention" or "mlp")."""
        wanted = getattr(self, part)
        # A patched class stands on the original one.
        for cls in getattr(type(module), "__tle_base__", type(module)).__mro__:
            if cls.__module__ == self.module and cls.__qualname__ == wanted:
                return True
            if "forward" in vars(cls):
                return False  # a user's subclass that computes something of its own
        return False


@cache
def all_families() -> tuple[Family, ...]:
    """Every family that a module of this package declares, sorted by name."""
    found: list[Family] = []
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        found += getattr(module, "FAMILIES", ()) or [module.FAMILY]
    return tuple(sorted(found, key=lambda family: family.name))


def family_of(module: torch.nn.Module) -> Family | None:
    """The family whose base model `module` is, or None."""
    return next((family for family in all_families() if family.is_made_of(module, "model")), None)
