"""Tiny random models of every family, with the settings that broke others."""

from __future__ import annotations

import tokenizers
import torch
import transformers as hf

COMMON = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# name -> (config class, settings on top of COMMON). All of these run a whole step in one call.
KNOWN = {
    "llama": (hf.LlamaConfig, {}),
    "llama_tied": (hf.LlamaConfig, {"tie_word_embeddings": True}),
    "llama_biases": (hf.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama3_rope": (
        hf.LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama_yarn": (
        hf.LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    # Frequencies change with the length once it passes max_position_embeddings, and back.
    "llama_dynamic": (
        hf.LlamaConfig,
        {
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        },
    ),
    "llama_odd_sizes": (
        hf.LlamaConfig,
        {"hidden_size": 60, "intermediate_size": 83, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "mistral": (hf.MistralConfig, {"sliding_window": None}),
    "mistral_window": (hf.MistralConfig, {"sliding_window": 8}),
    "qwen2": (hf.Qwen2Config, {}),
    "qwen2_window": (
        hf.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": (hf.Qwen3Config, {"head_dim": 32}),
    "smollm3": (hf.SmolLM3Config, {"no_rope_layers": [1, 0, 1], "num_hidden_layers": 3}),
}


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Gives every parameter a random value of a size at which it matters: biases of +-4 (Qwen2's are that large), norm
    weights away from 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if name.endswith("bias"):
                p.copy_((noise * 2).clamp(-4, 4))
            elif p.dim() == 1:
                p.copy_(1 + 0.3 * noise if "norm" in name else noise)
            else:
                p.copy_(noise * 0.7 / p.shape[-1] ** 0.5 if "embed" not in name else noise)


def build(name: str, dtype: torch.dtype = torch.float32, **settings):
    """A tiny model of KNOWN, in eval mode, with `settings` on top of its own."""
    config_class, own = KNOWN[name]
    return from_config(config_class(**{**COMMON, **own, **settings}), dtype)


def from_config(config, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomize(model)
    return model.to(dtype)


def tokens(batch: int, length: int, seed: int = 0, vocabulary: int = COMMON["vocab_size"]) -> torch.Tensor:
    """Token ids [batch, length] without special tokens."""
    return torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit (NaN equals NaN, 0 is not -0)."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def tokenizer() -> hf.PreTrainedTokenizerBase:
    """Words w0, w1, ... for the tokens of these models."""
    words = {f"w{i}": i for i in range(COMMON["vocab_size"])}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="w0", eos_token="w2")
