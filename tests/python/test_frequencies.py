"""Rotary frequencies of a patched model: the same bits on every machine, and the module's own when it is unpatched."""

import decimal
import os
import subprocess
import sys

import golden_cases
import numpy as np
import pytest
import tiny
import torch
from checks import assert_same_bits

import tle_torch

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e6, "original_max_position_embeddings": 16, "factor": 4.0,
            "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}


def patched(name: str, dtype: torch.dtype = torch.float32, scheme: str = "w8a8", **settings):
    model = tiny.build(name, dtype, **settings)
    rotary = model.model.rotary_emb
    before = {key: value.clone() for key, value in rotary._buffers.items()}, dict(vars(rotary))
    tle_torch.patch_model(model, scheme, progress=False)
    return model, rotary, before


def nearest(base: float, dim: int) -> torch.Tensor:
    """1 / base^(2i / dim), each operation rounded to the nearest fp32, from 40 decimal digits."""
    with decimal.localcontext(decimal.Context(prec=40)):
        exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
        powers = [float(decimal.Decimal(base) ** decimal.Decimal(float(e))) for e in exponents]
    return torch.from_numpy(np.float32(1) / np.array(powers, dtype=np.float32))


@pytest.mark.parametrize("base", [1e4, 1e5, 5e5, 1e6, 5e6])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_frequencies_are_the_nearest(base, dim):
    _, rotary, _ = patched("qwen3", head_dim=dim, rope_parameters={"rope_type": "default", "rope_theta": base})
    assert_same_bits(rotary.inv_freq, nearest(base, dim))
    assert_same_bits(rotary.original_inv_freq, rotary.inv_freq)


@pytest.mark.parametrize(
    "name, settings",
    [
        ("llama3_rope", {}),
        ("llama_yarn", {}),
        ("llama_dynamic", {}),
        ("qwen3", {}),
        ("llama", {"rope_parameters": LONGROPE}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_type_is_near_and_comes_back(name, settings, dtype):
    """Also after sequences beyond the length at which dynamic types and longrope change."""
    model, rotary, (buffers, attributes) = patched(name, dtype, **settings)
    own = tiny.build(name, dtype, **settings).model.rotary_emb
    x = torch.zeros(1, dtype=torch.float32)
    for length in (5, 60, 40, 5):
        positions = torch.arange(length)[None]
        for got, want in zip(rotary(x, positions), own(x, positions)):
            assert (got - want).abs().max() < (1e-5 if dtype == torch.float32 else 0.5)
    tle_torch.unpatch_model(model, dequantize=True)
    assert set(rotary._buffers) == set(buffers) and set(vars(rotary)) == set(attributes)
    for key, value in buffers.items():
        assert_same_bits(rotary._buffers[key], value, key)
    assert rotary.max_seq_len_cached == attributes["max_seq_len_cached"]


def test_frequencies_of_the_user_s_stay():
    model = tiny.build("llama")
    rotary = model.model.rotary_emb
    rotary.inv_freq.mul_(0.75)
    rotary.original_inv_freq.mul_(0.75)
    kept = rotary.inv_freq.clone()
    tle_torch.patch_model(model, progress=False)
    assert_same_bits(rotary.inv_freq, kept)


def answer() -> str:
    """Digests of a model's frequencies and logits."""
    settings = {"rope_type": "default", "rope_theta": 1e6}
    model, rotary, _ = patched("qwen3", torch.bfloat16, scheme="bf16", head_dim=128, rope_parameters=settings)
    # torch's random numbers are not those of another machine either.
    for seed, parameter in enumerate(model.parameters()):
        parameter.data.copy_(golden_cases.values(*parameter.shape, seed=seed, exponent=-2))
    with torch.inference_mode():
        return f"{golden_cases.digest(rotary.inv_freq)} {golden_cases.digest(model(torch.arange(3, 60)[None]).logits)}"


@pytest.mark.slow
def test_torch_s_own_kernels_do_not_matter():
    """torch without its vector kernels computes other powers; a patched model gives the same logits."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "ATEN_CPU_CAPABILITY": "default"}
    command = [sys.executable, "-c", "import test_frequencies; print(test_frequencies.answer())"]
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert run.stdout.strip() == answer()
