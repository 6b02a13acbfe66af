"""The models that benchmarks run: real weights where a package ships them, and real sizes with random weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent

# Models whose weights mean something: what quantisation costs them can be measured, and they have a GGUF file.
REAL = ("smollm2",)
# Sizes of published models: the configuration's class and what it is made with.
SHAPES = {
    "qwen3-0.6b": ("Qwen3Config", dict(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960)),
    "llama-1b": ("LlamaConfig", dict(  # Llama 3.2
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=131072,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192})),
}
NAMES = (*REAL, *SHAPES)


def fetched(what: str) -> Path:
    """What scripts/fetch.py brings (smollm2: the GGUF file; smollm2-hf: the same weights as a Hugging Face folder)."""
    command = [sys.executable, str(ROOT / "scripts" / "fetch.py"), what]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().splitlines()[-1])


def quiet() -> None:
    """No progress bars and no advice from transformers."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def random_model(config, dtype: torch.dtype):
    """A model of a configuration with tied embeddings, whose matrices are normal numbers and whose norms are ones."""
    from transformers import AutoModelForCausalLM

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
        name: one of NAMES.
        dtype: of its weights.
    """
    import transformers

    if name in REAL:
        return transformers.AutoModelForCausalLM.from_pretrained(fetched(f"{name}-hf"), dtype=dtype).eval()
    if name not in SHAPES:
        raise ValueError(f"unknown model {name!r}; known are {', '.join(NAMES)}")
    return random_model(config_of(name), dtype)


def config_of(name: str):
    """The configuration of a model with random weights."""
    import transformers

    config_class, sizes = SHAPES[name]
    return getattr(transformers, config_class)(**sizes, tie_word_embeddings=True)


def parameters(name: str) -> int:
    """How many weights a model with random ones has."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config_of(name)).parameters())
