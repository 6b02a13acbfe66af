"""SmolLM2-135M-Instruct with its real weights: the same logits, bit for bit, on every level, with every thread count,
in any batch."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checks import assert_same_bits, same_everywhere

import tle_torch

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def original():
    from transformers import AutoModelForCausalLM

    command = [sys.executable, str(ROOT / "scripts" / "fetch.py"), "smollm2-hf"]
    folder = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().splitlines()[-1]
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


@pytest.fixture(scope="module")
def tokenizer(original):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(original.config._name_or_path)


# Scheme and options of patch_model. The head, a fifth of the weights, takes most of the time under emulation when dense.
KINDS = [("w8a8", {}), ("w8a8-a32", {"kv_dtype": torch.int8})]
KINDS += [
    pytest.param((scheme, {"quantize_head": True}), marks=pytest.mark.slow)
    for scheme in ("w8a8-a32", "w8a8-g32", "w4a8-g32-asym")
]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join((kind[0], *kind[1])))
def patched(request, original):
    scheme, options = request.param
    model = copy.deepcopy(original)
    tle_torch.patch_model(model, scheme, **options, progress=False)
    return model


@torch.inference_mode()
def test_same_logits_on_every_level_and_thread_count(patched, tokenizer):
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    logits = same_everywhere(lambda: patched(ids).logits)
    assert logits.isfinite().all()
    assert tokenizer.decode(logits[0, -1].argmax()).strip() == "Paris"


@torch.inference_mode()
def test_same_logits_token_by_token_in_a_batch_and_module_by_module(patched, tokenizer):
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    want = patched(ids).logits

    cache, steps = None, []
    for i in range(ids.shape[1]):
        out = patched(ids[:, i : i + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits)
    assert_same_bits(torch.cat(steps, 1), want, "token by token")

    other = tokenizer("Once upon a time there was a robot that", return_tensors="pt").input_ids
    pad = other.shape[1] - ids.shape[1]
    both = torch.cat([torch.nn.functional.pad(ids, (pad, 0)), other])
    mask = torch.ones_like(both)
    mask[0, :pad] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    batch = patched(both, attention_mask=mask, position_ids=positions).logits
    assert_same_bits(batch[:1, pad:], want, "left-padded row")
    assert_same_bits(batch[1:], patched(other).logits, "other row")

    # A hook of the user's keeps the layers from being fused: module by module.
    seen = []
    handle = patched.model.layers[3].mlp.register_forward_hook(lambda *_: seen.append(1))
    assert_same_bits(patched(ids).logits, want, "module by module")
    handle.remove()
    assert seen


def test_the_same_tokens_as_unpatched(original, tokenizer):
    """Eight bits do not change a short, confident answer."""
    model = copy.deepcopy(original)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}],
                                         return_tensors="pt", add_generation_prompt=True, return_dict=True)
    want = model.generate(**chat, max_new_tokens=7, do_sample=False)
    tle_torch.patch_model(model, "w8a8-a32", progress=False)
    assert torch.equal(model.generate(**chat, max_new_tokens=7, do_sample=False), want)
