"""Llama 1-3, and the models published under its classes: SmolLM, SmolLM2, TinyLlama, Yi, ..."""

from tle_torch.families import Family

FAMILY = Family(
    name="llama",
    module="transformers.models.llama.modeling_llama",
    model="LlamaModel",
    layer="LlamaDecoderLayer",
    attention="LlamaAttention",
    mlp="LlamaMLP",
)
