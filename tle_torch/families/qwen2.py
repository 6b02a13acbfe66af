"""Qwen2 and Qwen2.5: biases on q, k and v, and a sliding window on some layers if the config says so."""

from tle_torch.families import Family

FAMILY = Family(
    name="qwen2",
    module="transformers.models.qwen2.modeling_qwen2",
    model="Qwen2Model",
    layer="Qwen2DecoderLayer",
    attention="Qwen2Attention",
    mlp="Qwen2MLP",
    windows="by type",
)
