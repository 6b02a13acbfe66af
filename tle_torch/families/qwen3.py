"""Qwen3 (dense): norms over each head's queries and keys, a head size of its own, no biases on q, k and v."""

from tle_torch.families import Family

FAMILY = Family(
    name="qwen3",
    module="transformers.models.qwen3.modeling_qwen3",
    model="Qwen3Model",
    layer="Qwen3DecoderLayer",
    attention="Qwen3Attention",
    mlp="Qwen3MLP",
    q_norm="q_norm",
    k_norm="k_norm",
    windows="by type",
)
