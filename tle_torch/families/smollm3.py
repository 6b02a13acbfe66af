"""SmolLM3: some layers do without the rotary embedding (NoPE)."""

from tle_torch.families import Family

FAMILY = Family(
    name="smollm3",
    module="transformers.models.smollm3.modeling_smollm3",
    model="SmolLM3Model",
    layer="SmolLM3DecoderLayer",
    attention="SmolLM3Attention",
    mlp="SmolLM3MLP",
    rotates="use_rope",
    windows="by type",
)
