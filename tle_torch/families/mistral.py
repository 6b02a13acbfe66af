"""Mistral: Llama with one sliding window, or none, for all layers."""

from tle_torch.families import Family

FAMILY = Family(
    name="mistral",
    module="transformers.models.mistral.modeling_mistral",
    model="MistralModel",
    layer="MistralDecoderLayer",
    attention="MistralAttention",
    mlp="MistralMLP",
    windows="all",
)
